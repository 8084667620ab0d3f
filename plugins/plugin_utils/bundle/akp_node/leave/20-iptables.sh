# shellcheck shell=sh disable=SC2015,SC2034,SC2154,SC3043
# include tools/iptables.sh
# ---------------------------------------------------------------- Leaving iptables
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

# Write into directory $1 what cleanup needs later: tables, KUBE-FIREWALL and counters as they were before us.
iptables_remember() {
    local fam known name
    for fam in $FAMILIES; do
        iptables_inventory "$fam" >"$1/tables.$fam" || die 4 "the tables of ipv$fam cannot be read, nothing was changed"
        sed -n -e '/^:KUBE-FIREWALL /p' -e '/^-A KUBE-FIREWALL /p' -e '/ -j KUBE-FIREWALL$/s/^-A/-I/p' "$work/$flavour.$fam" >"$1/firewall.$fam" && room ||
            die 4 "what is in KUBE-FIREWALL of ipv$fam cannot be kept, nothing was changed"
    done
    known=$(! has nfacct || nfacct list 2>/dev/null) || :
    for name in $COUNTERS; do case $known in *" = $name;"*) echo "$name" ;; esac; done >"$1/counters"
}

# Print the tables and built-in chains of family $1 in the nft flavour, as "table" and "table chain" lines. Without nft, those that a
# table can have count as there.
iptables_inventory() {
    if [ "$flavour" != nft ]; then return 0
    elif has nft; then
        nft list chains "ip${1#4}" >"$work/chains" 2>/dev/null &&
            awk '$1 == "table" { t = $3; print t } $1 == "chain" { c = $2 } $1 == "type" { print t, c }' "$work/chains"
    else awk '/^\*/ { t = substr($1, 2); print t } /^:/ && $2 != "-" { print t, substr($1, 2) }' "$work/nft.$1"
    fi
}

# Note in directory $1 what another program has in our place; iptables_back puts exactly that back.
iptables_keep() {
    local fam
    for fam in $FAMILIES; do cp "$work/$flavour.$fam" "$1/iptables.$fam" || return 1; done
    echo "$flavour" >"$1/flavour"
}

iptables_back() {
    local fam
    refused="what was there before cannot be read"
    read -r flavour <"$1/flavour" || return 1
    for fam in $FAMILIES; do
        iptables_save "$fam" "$work/$flavour.$fam" && iptables_compare "$work/$flavour.$fam" "$1/iptables.$fam" "$work/plan.$fam" own || return 1
    done
    iptables_commit || return 1
    [ -n "$undoing" ] || return 0
    for fam in $FAMILIES; do iptables_drop_tables "$fam"; done
    leave_counters
}

# End with 3 if there can be no nat table in a family of the bundle.
iptables_features() {
    local fam
    for fam in $FAMILIES; do
        iptables_files "$fam" "${dirs%% *}"
        [ -n "$reply" ] || continue
        case $seen in *" $flavour.$fam.nat "*) continue ;; esac
        ipt "$fam"
        nat_usable "$reply" || die 3 "missing kernel feature: the ipv$fam nat table for $reply"
    done
}
