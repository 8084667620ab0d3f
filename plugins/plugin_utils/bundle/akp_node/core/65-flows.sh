# shellcheck shell=sh disable=SC2034,SC2086,SC2154,SC3043
# ---------------------------------------------------------------- Flows
# True if UDP flows are to be looked at; reply is the files that say to which frontends: all, if the last run could not finish.
flows_pending() {
    local dir file
    reply=''
    # Of a delta, what it changes.
    if [ -z "$flows_due" ] && [ "$dirs" = "$r_dirs $bundle" ]; then set -- "$bundle"; else set -- $dirs; fi
    for dir; do
        for file in "$dir/conntrack.udp" "$dir/conntrack.udp.diff"; do [ ! -s "$file" ] || reply="$reply $file"; done
    done
    # Where record or wish are more than a bundle, their texts cannot be compared.
    [ -n "$reply" ] && { [ -n "$flows_due" ] || { [ "$dirs" != "$r_dirs" ] && ! cmp -s "$dirs/conntrack.udp" "$r_dirs/conntrack.udp"; }; }
}

# End UDP flows that are answered from where the new rules no longer send them; with $1 = count, only count them. Sets flows. Where a flow
# was sent and who answers make it stale, so one delete takes exactly the stale flows that share these. What cannot be listed or
# deleted is left to the next run, except where the kernel has no ctnetlink.
flows_apply() {
    local fam files n dst dport src sport
    flows_pending || return 0
    files=$reply
    for fam in ipv4 ipv6; do
        grep -q "^+\{0,1\}$fam " $files || continue
        if ! conntrack -L -f "$fam" -p udp >"$work/flows" 2>"$work/flows.err"; then
            if [ "$1" = count ] || grep -q -e 'Invalid argument' -e "Can't open handler" -e 'not supported' "$work/flows.err"
            then warn "the UDP flows of $fam cannot be listed"; else left_unfinished "the UDP flows of $fam cannot be listed"; fi
            continue
        fi
        awk -v fam="$fam" "$flows_awk" $files pass=flows "$work/flows" >"$work/flows.stale" ||
            left_unfinished "the UDP flows of $fam cannot be compared"
        while read -r n dst dport src sport; do
            [ "$1" = count ] ||
                conntrack -D -f "$fam" -p udp --orig-dst "$dst" --orig-port-dst "$dport" --reply-src "$src" --reply-port-src "$sport" \
                >/dev/null 2>"$work/flows.err" || grep -q ': 0 flow entries have been deleted' "$work/flows.err" ||
                { left_unfinished "the UDP flows to $dst port $dport that $src answers could not be ended"; continue; }
            flows=$((flows + n))
        done <"$work/flows.stale"
    done
}
