# shellcheck shell=sh disable=SC2015,SC2034,SC2086,SC2154,SC3043
# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
#
# akp-leave - remove what a mode has in the kernel, ours or kube-proxy's, and nothing else.
#
# A part of akp-node that few runs need: the first apply, a change of the mode, cleanup, and status before the first apply.
# akp-node reads it then into its own shell, if it has the digest that akp-node was made with. It also asks whether the kernel can do
# what a mode needs, and notes what was there before. docs/node-program.md lists the functions of a mode.
ALL_MODES='iptables nftables ipvs userspace'    # rules go before the sets that they ask

# reply is the modes that have something in the kernel.
leave_present() {
    local each found
    found=''
    for each in $ALL_MODES; do if "leave_${each}_present"; then found="$found $each"; fi; done
    reply=$found
}

# Remove what modes other than $b_mode have in the kernel; ipvs and userspace mode have iptables rules as well.
leave_others() {
    local each
    for each in $ALL_MODES; do
        case $b_mode/$each in "$each/$each" | ipvs/iptables | userspace/iptables) continue ;; esac
        "leave_${each}_present" || continue
        changed=true
        "leave_$each" || left_unfinished "what mode $each has in the kernel could not be removed: $refused"
    done
}

# The host is as it was before the first apply; foreign rules are not touched.
cleanup() {
    local each present
    flavour=$r_flavour
    leave_present
    present=$reply
    [ -z "$present" ] && [ ! -d "$STATE/before" ] || changed=true
    if [ -z "$dry_run" ]; then
        trap '' HUP INT TERM
        if [ -n "$undoing" ] && [ -f "$STATE/foreign/mode" ]; then
            read -r b_mode <"$STATE/foreign/mode"
            [ "$b_mode" = "$MODES" ] || run_elsewhere "$b_mode"
            as_before=false
            "${b_mode}_back" "$STATE/foreign" || die_refused
        else
            # What a tool refuses to remove comes back as it was.
            "${MODES}_read"
            mkdir "$work/keep" && "${MODES}_keep" "$work/keep" || die 3 "what is in the kernel cannot be kept $FULL"
            as_before=false
            for each in $present; do "leave_$each" || cleanup_refused; done
        fi
        [ ! -d "$STATE/before" ] || sysctls_restore
        forget_record
        [ -z "$unfinished" ] || die 4 "what was applied is removed, but not all of the rest could be set back (see the warnings)"
    fi
    put changed "$changed"
    put_text flavour "$flavour"
    put sysctls "$changed_sysctls"
    answer
}

# End because a tool refused to remove what the mode has: that comes back.
cleanup_refused() {
    local why
    why=$refused b_mode=$MODES
    if "${MODES}_back" "$work/keep" && [ -z "$unfinished" ]; then as_before=true; fi
    refused=$why
    die_refused
}

# Remove the record. What could not be set back is for the next cleanup.
forget_record() {
    if [ -n "$unfinished" ] && [ -d "$STATE/before" ]; then write_file "$STATE/before/sysctls" "$(cat "$work/sysctls.left")"
    else rm -rf "$STATE/before" "$STATE/unsettled"
    fi
    [ -n "$undoing" ] || confirm_disarm
    # Where releases are asked for, an old one must not count again.
    signed_only || rm -f "$STATE/counter" "$STATE/counter.new"
    rm -rf "$STATE"/record* "$STATE/bundles" "$STATE/before.new" "$STATE/others" "$STATE/draining" \
        "$STATE/undone" "$STATE"/confirmed* "$STATE/pull" "$STATE/queued" "$STATE"/health.* "$STATE"/akp-node.* "$STATE"/akp-leave.*
    read_record
    health_sync
    # Last, as others may begin then. An undo has yet to say that it came to its end.
    [ -n "$undoing$unfinished" ] || { rm -f "$STATE/lock" && rmdir "$STATE" 2>/dev/null; } || :
}

# Put back what was there before the first apply, except a sysctl that was changed since by other means.
sysctls_restore() {
    local path value
    dirs=$r_dirs
    sysctls_differ ''
    while read -r path value; do
        if grep -q "^$path " "$work/sysctls"; then warn "sysctl $path was changed by other means and stays"; else echo "$path $value"; fi
    done <"$STATE/before/sysctls" >"$work/sysctls.back"
    sysctls_undo "$work/sysctls.back"
}

# Remember, once for each mode, what cleanup has to put back. Written aside and renamed: it is whole or not there.
remember() {
    local file
    rm -rf "$STATE/before.new"
    mkdir "$STATE/before.new"
    "${b_mode}_remember" "$STATE/before.new"
    if [ -d "$STATE/before" ]; then
        for file in "$STATE/before.new"/*; do [ ! -e "$file" ] || mv "$file" "$STATE/before/"; done
    else
        : >"$STATE/before.new/sysctls"
        mv "$STATE/before.new" "$STATE/before"
        made_before=1
    fi
    : >"$STATE/before/$b_mode"
}
