# shellcheck shell=sh disable=SC2015,SC2034,SC2154,SC3043
# ---------------------------------------------------------------- iptables: its tools, and leaving it
# The nft and the legacy flavour are two sets of tables in one kernel, with tools of their own.
COUNTERS='ct_state_invalid_dropped_pkts localhost_nps_accepted_pkts'    # of nfacct, which rules of kube-proxy count with

# reply is the command of family $1 in the chosen flavour: ipt 6 save -> ip6tables-nft-save.
ipt() {
    case $1 in 4) reply=iptables ;; *) reply=ip6tables ;; esac
    if has "$reply-$flavour${2:+-$2}"; then reply=$reply-$flavour; fi
    reply=$reply${2:+-$2}
}

# reply is the flavour of the plain command; true if there is a command for flavour $1.
iptables_plain() { case $(iptables -V 2>/dev/null) in *nf_tables*) reply=nft ;; *) reply=legacy ;; esac; }
iptables_has() { has "iptables-$1" || { has iptables && iptables_plain && [ "$reply" = "$1" ]; }; }

# reply is those of our tables that family $1 has in the legacy flavour. To read another one would make it.
iptables_tables() {
    local name file
    reply='' file=/proc/net/ip6_tables_names
    [ "$1" = 6 ] || file=/proc/net/ip_tables_names
    [ ! -r "$file" ] || while read -r name; do case $name in mangle | filter | nat) reply="$reply $name " ;; esac; done <"$file"
}

# Write the tables of family $1 to file $2, as iptables-save prints them. False with refused if they cannot be read: what
# cannot be read must not be taken for what is not there.
iptables_save() {
    local tool t
    : >"$2"
    ipt "$1" save
    tool=$reply t=''
    has "$tool" || return 0
    if [ "$flavour" = nft ]; then
        # A kernel without nf_tables, and foreign tables that iptables cannot print, are no failure.
        "$tool" >"$2" 2>"$work/err" || grep -q -e 'rule set generation' -e incompatible "$work/err" || t=all
    else
        iptables_tables "$1"
        for t in $reply; do "$tool" -t "$t" >>"$2" 2>"$work/err" || break; t=''; done
    fi
    [ -n "$t" ] || return 0
    first_lines "$work/err" "$tool failed, so what the kernel has is not known"
    return 1
}

# Load file $2 of restore input in family $1, a transaction per table. On failure refused has the message and the line.
iptables_load() {
    local line
    ipt "$1" restore
    "$reply" -w 5 --noflush <"$2" >/dev/null 2>"$work/err" && return 0
    first_lines "$work/err" "$reply"
    case $refused in *[Ll]ine\ [0-9]* | *[Ll]ine:\ [0-9]*)
        line=${refused##*[Ll]ine} line=${line#:} line=${line# } line=${line%%[!0-9]*}
        refused="$refused-- $(awk -v n="$line" '/^\*/ { t = substr($1, 2) } NR == n { print (/^COMMIT/ ? "COMMIT of table " t : $0); exit }' "$2")" || :
        ;;
    esac
    return 1
}

# True if chains of kube-proxy are there, in either flavour, or counters for cleanup; also if that cannot be told, where status ends
# with 4. What would remove them is in $work/leave.*.
leave_iptables_present() {
    local mine fam back known found
    mine=$flavour found=''
    [ "$verb" != cleanup ] || [ ! -e "$STATE/before/counters" ] || found=1
    : >"$work/leave.kept"
    for flavour in nft legacy; do
        iptables_has "$flavour" || continue
        for fam in $FAMILIES; do
            back=/dev/null known=1 refused=''
            [ ! -e "$STATE/before/firewall.$fam" ] || back=$STATE/before/firewall.$fam
            [ -e "$STATE/before/tables.$fam" ] || known=''
            iptables_save "$fam" "$work/now" || case $verb in status | ask) die 4 "$refused" ;; esac
            [ -z "$refused" ] && awk -v nft="${flavour#legacy}" -v known="$known" -v kept="$work/leave.kept" "$iptables_owned_awk$iptables_leave_awk" \
                pass=0 "$back" pass=1 "$work/now" pass=2 "$work/now" >"$work/leave.$flavour.$fam" && room || { found=1; rm -f "$work/leave.$flavour.$fam"; continue; }
            [ ! -s "$work/leave.$flavour.$fam" ] || found=1
        done
    done
    flavour=$mine
    [ -n "$found" ]
}

# Remove our chains and jumps from both flavours, and what else was not there before us. Foreign rules stay byte for byte. False with
# refused; what was removed until then does not come back.
leave_iptables() {
    local mine fam ok
    refused='what is to be removed cannot be told'
    leave_iptables_present || :
    mine=$flavour ok=1
    trap '' HUP INT TERM
    for flavour in nft legacy; do
        iptables_has "$flavour" || continue
        for fam in $FAMILIES; do
            [ -e "$work/leave.$flavour.$fam" ] && { [ ! -s "$work/leave.$flavour.$fam" ] || iptables_load "$fam" "$work/leave.$flavour.$fam"; } || { ok=''; break 2; }
            iptables_drop_tables "$fam"
        done
    done
    flavour=$mine
    [ -n "$ok" ] || return 1
    iptables_warn_kept "$work/leave.kept"
    leave_counters
}

# Warn of the chains in file $1, lines "table chain rule".
iptables_warn_kept() {
    local t c rule
    while read -r t c rule; do warn "chain $c of table $t is empty but stays: a rule that is not ours jumps to it: $rule"; done <"$1"
}

# Remove tables and built-in chains of family $1 that were not there before us (before/tables.N) and hold nothing; nft flavour only.
# All of it twice: a chain that is not there and a tool that failed look the same.
iptables_drop_tables() {
    local ipt was t c
    [ "$flavour" = nft ] && [ -e "$STATE/before/tables.$1" ] || return 0
    was=$NL
    while read -r t; do was=$was$t$NL; done <"$STATE/before/tables.$1"
    ipt "$1"
    ipt=$reply
    for t in mangle filter nat mangle filter nat; do
        for c in PREROUTING INPUT FORWARD OUTPUT POSTROUTING; do
            case $was in *"$NL$t $c$NL"*) continue ;; esac
            # Not by nft, which would delete a chain with all the rules that came to it meanwhile.
            [ "$("$ipt" -t "$t" -S "$c" 2>/dev/null)" != "-P $c ACCEPT" ] || "$ipt" -t "$t" -X "$c" 2>/dev/null || :
        done
        case $was in *"$NL$t$NL"*) continue ;; esac
        # An empty table is two lines.
        ! has nft || [ "$(nft list table "ip${1#4}" "$t" 2>/dev/null | wc -l)" -ne 2 ] || nft delete table "ip${1#4}" "$t" 2>/dev/null || :
    done
}

# Delete the counters that were not there before us.
leave_counters() {
    local name
    [ ! -e "$STATE/before/counters" ] || for name in $COUNTERS; do
        grep -q -x "$name" "$STATE/before/counters" || drop_counter "$name"
    done
}

# Delete a counter. The kernel lets go of removed rules a moment after the transaction, so it is tried for a while.
drop_counter() {
    local try said
    for try in 1 2 3 4 5 6 7 8 9; do
        nfacct get "$1" >/dev/null 2>&1 || return 0
        ! said=$(nfacct delete "$1" 2>&1) || return 0
        sleep 0.2 2>/dev/null || sleep 1
    done
    case $said in *busy*) warn "counter $1 is in use and stays" ;; *) left_unfinished "counter $1 could not be removed" ;; esac
}
