# shellcheck shell=sh disable=SC2034,SC2059,SC2154,SC3043
# ---------------------------------------------------------------- Leaving nftables
# Print a line of nft for each table of ours or kube-proxy's; kube-proxy-generation are those of markers of akp/v1.
leave_nft_lines() { printf "$1\\n" 'ip kube-proxy' 'ip6 kube-proxy' 'ip kube-proxy-generation' 'ip6 kube-proxy-generation'; }

# True if such a table is there: nft pretends to delete them, which lists nothing. Where it does not tell, one may be.
leave_nftables_present() {
    local said
    has nft || return 1
    said=$(leave_nft_lines 'delete table %s' | nft -c -f - 2>&1) && return 0
    case $said in *'No such file'*'No such file'*'No such file'*'No such file'* | *'not supported'*) return 1 ;; esac
}

# Remove these tables, and put the listing in file $1 in their place if there is one: all in one transaction. False with refused.
leave_nftables() {
    { leave_nft_lines 'add table %s' && leave_nft_lines 'delete table %s'; } >"$work/nft.leave"
    if [ -s "${1:-}" ]; then cat "$1" >>"$work/nft.leave" || { refused="what was there before cannot be read"; return 1; }; fi
    nft -f "$work/nft.leave" 2>"$work/err" || { first_lines "$work/err"; return 1; }
}

# Nothing but the tables is ours, and cleanup removes them.
nftables_remember() { :; }

# Keep what another program has in the tables; nftables_back puts exactly that in place of ours.
nftables_keep() { ! has nft || nft_list "$1/nft"; }
nftables_back() { leave_nftables "$1/nft"; }

# Every kind of object and rule that kube-proxy makes: NAME|COMMAND.
NFT_FEATURES='nf_tables with comments on tables|add table F akp { comment "probe" ; } ; add chain F akp t
comments on chains|add chain F akp c { comment "probe" ; }
nat chains (module nft_chain_nat)|add chain F akp n { type nat hook postrouting priority 100 ; }
verdict maps with concatenated keys|add map F akp m { type TYPE . inet_proto . inet_service : verdict ; comment "probe" ; }
dynamic sets with timeouts|add set F akp s { type TYPE ; flags dynamic,timeout ; timeout 60s ; }
set updates from rules|add rule F akp c update @s { F saddr }
fib lookups (module nft_fib)|add rule F akp c fib saddr type local return
conntrack matches (module nft_ct)|add rule F akp c ct state new ct status dnat return
reject (module nft_reject)|add rule F akp c reject
random maps of address and port (nft 1.0.1 and Linux 5.13)|add rule F akp c meta l4proto tcp dnat F addr . port to numgen random mod 2 map { 0 : ADDR . 80 , 1 : ADDR . 81 }
random verdict maps (module nft_numgen)|add rule F akp c numgen random mod 2 vmap { 0 : goto t , 1 : goto t }
masquerading (module nft_masq)|add rule F akp n masquerade fully-random
lookups in verdict maps|add rule F akp c F daddr . meta l4proto . th dport vmap @m'

# End with 3 if the kernel lacks one of these features in a family of the bundle.
nftables_features() {
    local f
    nft_families "${dirs%% *}" || die 3 "nftables-1-endpoints.nft cannot be read"
    for f in $reply; do nft_probe "$f"; done
}

# Try every feature in a family, changing nothing. If one is refused, find out which: each needs those before it.
nft_probe() {
    local to what command
    case $1 in ip) to='s/TYPE/ipv4_addr/;s/ADDR/192.0.2.1/g' ;; ip6) to='s/TYPE/ipv6_addr/;s/ADDR/2001:db8::1/g' ;; esac
    printf '%s\n' "$NFT_FEATURES" | sed -e "s/ F / $1 /g" -e "$to" >"$work/features"
    sed 's/^[^|]*|//' "$work/features" >"$work/probe"
    nft_load -c -f "$work/probe" && return 0
    : >"$work/probe"
    while IFS='|' read -r what command; do
        printf '%s\n' "$command" >>"$work/probe"
        nft_load -c -f "$work/probe" || die 3 "missing kernel feature: $what, family $1: $refused"
    done <"$work/features"
}
