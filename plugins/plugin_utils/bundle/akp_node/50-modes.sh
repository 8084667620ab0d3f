# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Modes
# A mode is a set of functions, and the verbs know no other:
#   MODE_guard      every line of its files is allowed, else 2
#   MODE_current    a cheap look says that the kernel has the bundle
#   MODE_read       read the kernel, changing nothing
#   MODE_preflight  tools and kernel features are there, else 3
#   MODE_compare    plan the change
#   MODE_pending    the plan has something to do
#   MODE_commit     carry it out; on failure all is as before and $work/refused says why
#   MODE_counts     the plan as JSON: chains by family
#   MODE_details    the plan as JSON: a list of differences
#   MODE_markers    the generations in the kernel, "family table generation" lines, and MODE_expected
#   MODE_remove     everything of the mode is gone; like commit

iptables_guard() {
    guard_iptables 4 iptables.rules
    guard_iptables 6 ip6tables.rules
}

iptables_preflight() {
    [ -z "$flavour_trouble" ] || die 3 "$flavour_trouble"
    need iptables iptables
    flavour_present "$flavour" || die 3 "missing tool: iptables-$flavour (package iptables)"
    for fam in $FAMILIES; do
        rules_file "$fam"
        [ -n "$file" ] || continue
        for what in save restore; do
            ipt "$fam" "$what"
            need "$ipt" iptables
        done
        family_works "$fam" || die 3 "missing kernel feature: the ipv$fam nat table for $ipt"
    done
    if conntrack_pending; then need conntrack conntrack; fi
    counters_wanted
    [ -z "$wanted" ] || need nfacct nfacct
}

# Does every table carry the bundle's marker and jumps?
iptables_current() {
    ipt 4
    has "$ipt" || return 1
    for fam in $FAMILIES; do
        rules_file "$fam"
        [ -n "$file" ] || continue
        iptables_glance "$fam" >"$work/glance"
        # Not in a pipe: a tool that fails would leave nothing to look for, and nothing would be missing.
        grep -e '^\*' -e '^-I ' -e '^-A KUBE-PROXY-GENERATION ' "$file" >"$work/frame" || return 1
        awk 'NR == FNR { if (/^\*/) t = $1; else have[t, $0] = 1; next }
             /^\*/ { t = $1; next }
             { sub(/^-I/, "-A"); if (!((t, $0) in have)) exit 1 }' "$work/glance" "$work/frame" || return 1
    done
}

# The built-in chains and the marker of filter and nat. On nft single chains are read; on legacy any
# read copies the table, so each is read once, up to the marker.
iptables_glance() {
    for t in filter nat; do
        printf '*%s\n' "$t"
        if [ "$flavour" = nft ]; then
            case $t in filter) chains='INPUT FORWARD OUTPUT' ;; nat) chains='PREROUTING OUTPUT POSTROUTING' ;; esac
            ipt "$1"
            for c in KUBE-PROXY-GENERATION $chains; do "$ipt" -t "$t" -S "$c" 2>/dev/null || :; done
            continue
        fi
        legacy_tables "$1"
        case "$tables " in *" $t "*) ;; *) continue ;; esac
        ipt "$1" save
        "$ipt" -t "$t" | awk '/^-A [A-Z]+ / { print } /^-A KUBE-PROXY-GENERATION / { print; exit }'
    done
}

# Families without a file are wanted empty: what an earlier bundle left there goes.
iptables_compare() {
    for fam in $FAMILIES; do
        rules_file "$fam"
        firewall_owner "$fam"
        iptables_plan "$work/actual.$fam" "${file:-/dev/null}" "$work/plan.$fam" "$owner" ||
            die 3 "the comparison of ipv$fam rules failed (is ${TMPDIR:-/tmp} full?)"
    done
    iptables_warn_kept
}

iptables_warn_kept() {
    for fam in $FAMILIES; do
        [ -s "$work/plan.$fam/kept" ] || continue
        while read -r t c rule; do
            warn "ipv$fam chain $c of table $t is empty but stays: a rule that is not ours jumps to it: $rule"
        done <"$work/plan.$fam/kept"
    done
}

iptables_pending() { plan_pending "$work/plan.4" || plan_pending "$work/plan.6"; }

iptables_commit() { iptables_carry_out; }

iptables_counts() {
    comma=
    for fam in $FAMILIES; do
        read -r new other gone same moved <"$work/plan.$fam/counts"
        printf '%s"ipv%s": {"added": %d, "changed": %d, "removed": %d, "same": %d, "jumps": %d}' \
            "$comma" "$fam" "$new" "$other" "$gone" "$same" "$moved"
        comma=', '
    done
}

# "chain service" for the chains of Services in a rules file ($1): dispatch rules name theirs, and lead to the others.
chain_services() {
    awk '
        $1 != "-A" { next }
        match($0, / -j KUBE-(SVC|SVL|EXT|FW|SEP)-[A-Z2-7]+$/) {
            target = substr($0, RSTART + 4)
            if ($2 ~ /^KUBE-(SERVICES|NODEPORTS)$/) {
                if (match($0, /"[a-z0-9.-]+\/[a-z0-9.:-]+/)) owner[target] = substr($0, RSTART + 1, RLENGTH - 1)
            } else { from[++n] = $2; to[n] = target }
        }
        END {
            # From KUBE-FW to KUBE-EXT to KUBE-SVC to KUBE-SEP.
            for (round = 1; round <= 3; round++) for (i = 1; i <= n; i++) if (from[i] in owner && !(to[i] in owner)) owner[to[i]] = owner[from[i]]
            for (chain in owner) print chain, owner[chain]
        }' "$1"
}

iptables_details() {
    for fam in $FAMILIES; do
        # Rules without a comment, in chains that came with a delta: the way to them names the Service.
        rules_file "$fam"
        if [ -n "$file" ] && awk -F '\t' '$4 == "" && $3 ~ /^KUBE-(SVC|SVL|EXT|FW|SEP)-/ { found = 1; exit } END { exit !found }' "$work/plan.$fam/detail"; then
            chain_services "$file" >"$work/owners"
            awk -F '\t' -v OFS='\t' -v owners="$work/owners" '
                BEGIN { while ((getline row < owners) > 0) { split(row, part, " "); owner[part[1]] = part[2] } }
                $4 == "" && $3 in owner { $4 = owner[$3] }
                { print }' "$work/plan.$fam/detail" >"$work/named"
            mv "$work/named" "$work/plan.$fam/detail"
        fi
        awk -F '\t' -v fam="ipv$fam" "$AWK_QUOTE"'{
            printf "{\"family\": \"%s\", \"kind\": \"%s\", \"table\": \"%s\"", fam, $1, $2
            if ($3 != "") printf ", \"chain\": %s", quote($3)
            if ($4 != "") printf ", \"service\": %s", quote($4)
            if ($5 != "") printf ", \"rule\": %s", quote($5)
            print "}"
        }' "$work/plan.$fam/detail"
    done | awk '{ printf "%s%s", (NR > 1 ? ", " : ""), $0 }'
}

# Where the recorded bundle has markers: "family table" lines.
iptables_expected() {
    for fam in $FAMILIES; do
        rules_file "$fam"
        if [ -n "$file" ]; then printf 'ipv%s filter\nipv%s nat\n' "$fam" "$fam"; fi
    done
}

iptables_markers() {
    for fam in $FAMILIES; do
        iptables_glance "$fam" | awk -v fam="ipv$fam" '
            /^\*/ { t = substr($1, 2) }
            /^-A KUBE-PROXY-GENERATION / { gsub(/"/, "", $NF); print fam, t, $NF }'
    done
}

# What cleanup needs to know later; called before anything is written.
iptables_remember() {
    for fam in $FAMILIES; do
        : >"$1/firewall.$fam"
        : >"$1/tables.$fam"
        [ "$flavour" != nft ] || iptables_inventory "$fam" >"$1/tables.$fam" || die 4 "the tables of ipv$fam cannot be read"
        [ -s "$work/actual.$fam" ] || continue
        iptables_firewall "$work/actual.$fam" >"$1/firewall.$fam" || die 4 "what is in KUBE-FIREWALL of ipv$fam cannot be kept, nothing was changed"
    done
}

# Remove our chains, jumps, and the tables they made. KUBE-FIREWALL goes back to what it was before us;
# while kubelet is here its rules stay what kubelet made them.
iptables_remove() {
    for fam in $FAMILIES; do
        firewall_owner "$fam"
        if iptables_left_behind "$fam" >"$work/wanted" && iptables_plan "$work/actual.$fam" "$work/wanted" "$work/plan.$fam" "$owner"; then continue; fi
        echo "what is to be removed cannot be told (is ${TMPDIR:-/tmp} full?)" >"$work/refused"
        return 1
    done
    iptables_warn_kept
    iptables_carry_out || return 1
    iptables_drop_tables
}

# What of a family is there after us, as wanted text; $owner is then who fills KUBE-FIREWALL.
iptables_left_behind() {
    if foreign_noted "iptables.$1"; then
        owner=own
        cat "$STATE/foreign/iptables.$1"
    elif [ ! -s "$STATE/before/firewall.$1" ]; then :
    elif kubelet_here "$1"; then grep -v '^-A' "$STATE/before/firewall.$1"
    else
        owner=own
        cat "$STATE/before/firewall.$1"
    fi
}

# Read the kernel again, where that is cheap enough to be done after every change.
iptables_reread() {
    [ "$(cat "$bundle"/*.rules | wc -c)" -le "$GLIMPSE_LIMIT" ] || return 1
    for fam in $FAMILIES; do iptables_save "$fam" >"$work/actual.$fam"; done
}

# Everything of ours that the kernel holds, as lines; different whenever any of it is.
iptables_glimpse() {
    for fam in $FAMILIES; do
        ipt "$fam" save
        if [ "$flavour" = nft ]; then "$ipt" 2>/dev/null || :
        else
            legacy_tables "$fam"
            for t in $tables; do "$ipt" -t "$t" 2>/dev/null || :; done
        fi
    done | sed -n -e '/^:KUBE-KUBELET-CANARY /d' -e '/^:KUBE-IPTABLES-HINT /d' -e '/KUBE-/p'
}

