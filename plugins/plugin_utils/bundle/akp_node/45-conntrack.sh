# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Conntrack
flows=0

# True when conntrack.udp has lines and they are not those of the recorded bundle.
conntrack_pending() {
    [ -s "$bundle/conntrack.udp" ] || return 1
    recorded_bundle
    [ -z "$recorded" ] || ! cmp -s "$recorded/conntrack.udp" "$bundle/conntrack.udp"
}

# Delete UDP flows that are answered from where the bundle no longer sends them; after the rules.
# With "count" nothing is deleted. Whether a flow is stale depends only on where it was sent and who
# answers, so one delete by these four values takes exactly the stale flows that share them.
conntrack_apply() {
    conntrack_pending || return 0
    for fam in $FAMILIES; do
        grep -q "^ipv$fam " "$bundle/conntrack.udp" || continue
        conntrack -L -f "ipv$fam" -p udp >"$work/flows" 2>/dev/null || { warn "the UDP flows of ipv$fam cannot be listed"; continue; }
        stale_flows "$fam" "$bundle/conntrack.udp" "$work/flows" >"$work/stale"
        while read -r n dst dport src sport; do
            flows=$((flows + n))
            [ "$1" != count ] || continue
            # Flows that ended meanwhile are no failure.
            conntrack -D -f "ipv$fam" -p udp --orig-dst "$dst" --orig-port-dst "$dport" \
                --reply-src "$src" --reply-port-src "$sport" >/dev/null 2>&1 || :
        done <"$work/stale"
    done
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

