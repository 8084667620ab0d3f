# shellcheck shell=sh disable=SC2015,SC2034,SC2154,SC3043
# ---------------------------------------------------------------- iptables: its tools
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

# Load file $2 of restore input in family $1, a transaction per table; what it lists goes to file $3. On failure refused has the message
# and the line.
iptables_load() {
    local line
    ipt "$1" restore
    "$reply" -w 5 --noflush <"$2" >"${3:-/dev/null}" 2>"$work/err" && return 0
    first_lines "$work/err" "$reply"
    case $refused in *[Ll]ine\ [0-9]* | *[Ll]ine:\ [0-9]*)
        line=${refused##*[Ll]ine} line=${line#:} line=${line# } line=${line%%[!0-9]*}
        refused="$refused-- $(awk -v n="$line" '/^\*/ { t = substr($1, 2) } NR == n { print (/^COMMIT/ ? "COMMIT of table " t : $0); exit }' "$2")" || :
        ;;
    esac
    return 1
}

# Warn of the chains in file $1, lines "table chain rule".
iptables_warn_kept() {
    local t c rule
    while read -r t c rule; do warn "chain $c of table $t is empty but stays: a rule that is not ours jumps to it: $rule"; done <"$1"
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
