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
    nft -f "$work/nft.leave" 2>"$work/nft.err" || { first_lines "$work/nft.err"; return 1; }
    [ ! -e "$STATE/stale" ] || rm -f "$STATE/stale"
}
