# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Conntrack
flows=0
flows_due=    # yes or no, from the first time that it was asked: later in a run the mark may be its own

# True when conntrack.udp has lines and they are not those of the recorded bundle, or an earlier run could not finish: it may
# have failed to look at the flows.
conntrack_pending() {
    [ -s "$bundle/conntrack.udp" ] || return 1
    if [ -z "$flows_due" ]; then
        if [ -e "$STATE/unsettled" ]; then flows_due=yes; else flows_due=no; fi
    fi
    [ "$flows_due" = no ] || return 0
    recorded_bundle
    [ -z "$recorded" ] || ! cmp -s "$recorded/conntrack.udp" "$bundle/conntrack.udp"
}

# Delete UDP flows that are answered from where the bundle no longer sends them; after the rules.
# With "count" nothing is deleted. Whether a flow is stale depends only on where it was sent and who
# answers, so one delete by these four values takes exactly the stale flows that share them. What cannot be read or deleted
# is left to the next run.
conntrack_apply() {
    conntrack_pending || return 0
    for fam in $FAMILIES; do
        there=0
        grep -q "^ipv$fam " "$bundle/conntrack.udp" || there=$?
        [ "$there" != 1 ] || continue
        if [ "$there" != 0 ] || ! conntrack -L -f "ipv$fam" -p udp >"$work/flows" 2>"$work/err"; then
            if [ "$1" = count ] || conntrack_unsupported; then warn "the UDP flows of ipv$fam cannot be listed"
            else left_unfinished "the UDP flows of ipv$fam cannot be listed"
            fi
            continue
        fi
        stale_flows "$fam" "$bundle/conntrack.udp" "$work/flows" >"$work/stale"
        while read -r n dst dport src sport; do
            if [ "$1" = count ] || conntrack_delete; then flows=$((flows + n))
            else left_unfinished "the UDP flows to $dst port $dport that $src answers could not be ended"
            fi
        done <"$work/stale"
    done
}

# Did the listing fail because this kernel lets nobody see its flows (no ctnetlink)? Then no later run can, either.
conntrack_unsupported() {
    while read -r line; do
        case $line in *'Invalid argument'* | *"Can't open handler"* | *'not supported'*) return 0 ;; esac
    done <"$work/err"
    return 1
}

# Delete the flows of $fam from $dst, $dport to $src, $sport; those that ended meanwhile are no failure.
conntrack_delete() {
    conntrack -D -f "ipv$fam" -p udp --orig-dst "$dst" --orig-port-dst "$dport" \
        --reply-src "$src" --reply-port-src "$sport" >/dev/null 2>"$work/err" && return 0
    while read -r line; do
        case $line in *': 0 flow entries have been deleted'*) return 0 ;; esac
    done <"$work/err"
    return 1
}

# "count dst dport reply-src reply-sport" of the flows in a conntrack listing ($3) that $2 disowns.
stale_flows() {
    awk -v fam="ipv$1" '
        FNR == NR {
            if ($1 != fam || $2 == "*" && $4 == "-") next
            front[$2, $3] = 1
            n = split($4, reply, ",")
            for (i = 1; i <= n; i++) good[$2, $3, reply[i]] = 1
            next
        }
        $1 == "udp" {
            n = 0
            for (i = 2; i <= NF; i++) if ($i ~ /^(src|dst|sport|dport)=/) v[++n] = substr($i, index($i, "=") + 1)
            if (n < 8) next
            from = fam == "ipv6" ? "[" v[5] "]:" v[7] : v[5] ":" v[7]
            if ((v[2], v[4]) in front && !((v[2], v[4], from) in good) ||
                ("*", v[4]) in front && !(("*", v[4], from) in good)) stale[v[2] " " v[4] " " v[5] " " v[7]]++
        }
        END { for (key in stale) print stale[key], key }' "$2" "$3"
}

