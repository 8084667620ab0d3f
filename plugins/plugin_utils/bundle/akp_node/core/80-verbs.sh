# shellcheck shell=sh disable=SC2015,SC2034,SC2086,SC2153,SC2154,SC3043
# ---------------------------------------------------------------- Verbs
# A mode is a set of functions, and the verbs know no other. DIRS is a bundle directory and those of deltas after it.
#   M_shapes                shapes: the table of lines that its files may hold
#   M_preflight             tools and kernel features that $dirs need are there, else 3
#   M_look GENERATION DIRS  the kernel holds the markers of a generation and the jumps; a cheap look
#   M_markers               print the markers in the kernel, "FAMILY TABLE GENERATION" each
#   M_read, M_plan DIRS, M_pending, M_commit    read the kernel, compare, anything to do, carry it out
#   M_delta DIR             load a delta: 0 taken, 1 refused and all as before, 2 refused and part may be in force
#   M_before, M_undo_before, M_settle    what rules need beside them, its undo, what follows a change
#   M_counts, M_report, M_details        the plan as JSON
#   M_remember DIR, M_keep DIR, M_back DIR    what was there before us
# In every program: leave_M_present, leave_M    objects of mode M, ours or kube-proxy's; remove them

# The kernel becomes the bundle, or goes where the delta leads; what is there already changes nothing.
verb_apply() {
    open_bundle "$1"
    if [ "$verb" = apply ]; then
        lock
        confirm_turn
        check_age
    fi
    check_automation
    previous=$r_generation flavour=$r_flavour
    check_shrink
    if [ "$b_kind" = Delta ]; then apply_delta
    elif [ "$verb" = check ]; then compare_only
    else switch_to "$b_digest" 0
    fi
}

# What apply would do; nothing is written, not even in the state directory.
verb_check() { verb_apply "$1"; }

# End with 2 if more than $max_removed percent of the service ports, or all endpoints, would go. The numbers are signed.
check_shrink() {
    local lost
    if [ -z "$r_generation" ] || [ "${max_removed:-100}" -ge 100 ]; then return 0; fi
    lost=$((r_ports - b_ports))
    if [ $((lost * 100)) -gt $((max_removed * r_ports)) ]; then
        reply="$lost of $r_ports service ports would be removed, more than $max_removed %"
    elif [ "$b_endpoints" -eq 0 ] && [ "$r_endpoints" -gt 0 ]; then reply="none of $r_endpoints endpoints would be left"
    else return 0
    fi
    die 2 "refused: $reply. If that is meant, allow it with --max-removed 100 (kube_proxy_max_removed_percent)"
}

# The kernel becomes $dirs, which is then recorded as bundle $1 with its first $2 deltas. The lock is held.
switch_to() {
    if [ -z "$verify" ] && [ "$r_generation" = "$b_generation" ] && ! confirm_overdue && is_current; then
        # A whole bundle of what is in force replaces snapshot and log, and the kernel is left alone.
        unset_sysctls=$r_unset
        [ "$1 $2" = "$r_snapshot $r_deltas" ] || { keep_bundle; record_state "$1" "$2"; }
        "${b_mode}_settle"
        end_change
        return 0
    fi
    sync_begins
    "${b_mode}_read"
    "${b_mode}_preflight"
    "${b_mode}_plan" $dirs
    remember
    keep_bundle
    keep_program
    confirm_arm
    # A run that is cut short while it changes the mode leaves both in the kernel: the next one cleans up.
    if [ -n "$r_mode" ] && [ "$r_mode" != "$b_mode" ] && [ ! -e "$STATE/unsettled" ]; then switching=1; : >"$STATE/unsettled"; fi
    as_before=false
    sysctls_apply
    "${b_mode}_before"
    if [ "$changed_sysctls" -gt 0 ] || [ "$r_generation" != "$b_generation" ]; then changed=true; fi
    if "${b_mode}_pending"; then
        changed=true
        "${b_mode}_commit" || { undo_all; die_refused; }
    fi
    trap '' HUP INT TERM
    "${b_mode}_settle"
    leave_other_modes
    flows_apply delete
    if [ "$changed" = true ] || [ "$1 $2" != "$r_snapshot $r_deltas" ] || [ -e "$STATE/unsettled" ]; then record_state "$1" "$2"; fi
    install_program
    end_change
}

# After a change, or without one: the release counts, terms begin or end, health checks follow, and the answer.
end_change() {
    note_release
    confirm_end
    health_changed
    print_change
}

# Remove what other modes have in the kernel, ours or kube-proxy's, once the new rules are in: until then both serve. Rules go
# before the sets that they ask.
leave_other_modes() {
    local each
    [ "$r_mode" != "$b_mode" ] || [ -e "$STATE/unsettled" ] || [ -e "$STATE/others" ] || return 0
    # Another program's rules stay until the first change of ours is confirmed: the undo needs only ours to go.
    if [ -n "$armed" ] && [ -z "$r_snapshot" ]; then : >"$STATE/others"; return 0; fi
    for each in iptables nftables ipvs userspace; do
        case $b_mode/$each in "$each/$each" | ipvs/iptables | userspace/iptables) continue ;; esac
        "leave_${each}_present" || continue
        changed=true
        "leave_$each" || left_unfinished "what mode $each has in the kernel could not be removed: $refused"
    done
    [ ! -e "$STATE/others" ] || rm -f "$STATE/others"
}

# True if everything that an apply of the recorded state would set has its value, by a cheap look.
is_current() {
    [ "$r_mode" = "$b_mode" ] && [ ! -e "$STATE/unsettled" ] || return 1
    flavour=$r_flavour
    "${b_mode}_look" "$r_generation" $r_dirs && sysctls_differ "$r_unset" && [ ! -s "$work/sysctls" ]
}

# Load a delta. It is taken if it begins where the record ends; the kernel refuses it if that is not in force.
apply_delta() {
    local status
    status=0
    if [ "$r_generation" = "$b_generation" ] && is_current; then end_change; return 0; fi
    if [ "$r_mode" != "$b_mode" ]; then need_full "no bundle of mode $b_mode is recorded"
    elif [ "$r_generation" != "$b_base" ]; then need_full "generation $r_generation is recorded, not $b_base"
    elif [ -e "$STATE/unsettled" ]; then need_full "a run was cut short"
    elif [ "$r_deltas" -ge "$MAX_LOG" ]; then need_full "there are $r_deltas deltas since the last whole bundle"
    fi
    changed=true
    if [ "$verb" = check ]; then
        "${b_mode}_look" "$b_base" $r_dirs || need_full "the kernel does not have generation $b_base"
        print_change
        return 0
    fi
    sync_begins
    keep_bundle
    confirm_arm
    as_before=false dirs="$r_dirs $bundle" unset_sysctls=$r_unset
    if has_file sysctls.conf; then sysctls_apply; fi
    "${b_mode}_before"
    "${b_mode}_delta" "$bundle" || status=$?
    if [ "$status" != 0 ]; then
        [ "$status" = 1 ] || left_unfinished "part of the delta may be in force"
        undo_all
        case $refused in *'xtables lock'*) die 5 "locked: $refused" ;; esac
        need_full "the kernel refused: $refused"
    fi
    trap '' HUP INT TERM
    "${b_mode}_settle"
    flows_apply delete
    record_state "$r_snapshot" $((r_deltas + 1))
    end_change
}

# End because only a whole bundle will do: that is no failure, and nothing was changed unless the answer says so.
need_full() {
    say "a whole bundle is needed: $1"
    put changed false asBefore "$as_before"
    put_text need full reason "$1" node "$b_node" mode "$b_mode" generation "$r_generation"
    answer
    confirm_failed
    exit 0
}

# The answer of apply and check. A run that could not finish is no success.
print_change() {
    [ -z "$unfinished" ] || die 4 "the new state is in force, but not all of the old one could be removed (see the warnings)"
    put changed "$changed"
    put_text node "$b_node" mode "$b_mode" flavour "$flavour" generation "$b_generation" previous "$previous"
    [ ! -d "$work/plan.4" ] || put chains "{$("${b_mode}_counts")}"
    reply=$("${b_mode}_report")
    members="$members${reply:+, }${reply%, }"
    put deltas "$r_deltas" sysctls "$changed_sysctls" flows "$flows"
    if [ -z "$confirm_within" ]; then :
    elif confirm_waits && [ "$u_generation" = "$b_generation" ]; then put confirm "\"$u_token\"" confirmWithin "$left"
    else put confirm null confirmWithin null
    fi
    [ "$verb$verify" != check1 ] || put differences "[$("${b_mode}_details")]"
    answer
}

# Compare the kernel with $dirs, and print the answer.
compare_only() {
    "${b_mode}_read"
    "${b_mode}_preflight"
    "${b_mode}_plan" $dirs
    sysctls_differ "$r_unset"
    changed_sysctls=$(wc -l <"$work/sysctls")
    flows_apply count
    if "${b_mode}_pending" || [ "$changed_sysctls" -gt 0 ] || [ "$r_generation" != "$b_generation" ]; then changed=true; fi
    print_change
}

# Is what was applied still there?
#   applied  every marker is the recorded generation, and the jumps are there
#   absent   nothing recorded, nothing of ours in the kernel
#   flushed  recorded, but no marker in the kernel: flushed, or rebooted
#   partial  some markers or jumps are missing, or a run could not finish
#   foreign  the kernel has another generation, or chains of ours that are not recorded
verb_status() {
    status_members
    answer
}

# Put the state, and with --verify every difference from the record, into the answer.
status_members() {
    local drift
    drift=''
    if [ -n "$verify" ] && [ -n "$r_generation" ]; then find_drift; drift=$reply; fi
    find_state
    put_text state "$state" generation "$r_generation" mode "$r_mode" node "$r_node" flavour "$r_flavour"
    kept_generations
    put deltas "$r_deltas" servicePorts "$r_ports" appliedAt "${r_time:-null}" kept "[$reply]"
    confirm_status
    [ -n "$drift" ] || return 0
    [ "$drift" -eq 0 ] || put since "{\"generation\": \"$r_generation\", \"appliedAt\": $r_time}"
    put drift "$drift" differences "[$(cat "$work/differences")]"
}

# reply is how many differences there are between the kernel and the record; $work/differences has them as JSON.
find_drift() {
    b_mode=$r_mode dirs=$r_dirs flavour=$r_flavour
    "${b_mode}_read"
    "${b_mode}_plan" $r_dirs
    sysctls_differ "$r_unset"
    # Not in a pipe, where a tool that fails would leave less to count.
    "${b_mode}_details" >"$work/details"
    echo >>"$work/details"
    awk 'NF && FILENAME !~ /sysctls$/ { printf "%s%s", comma, $0; comma = ", "; next }
        NF { printf "%s{\"kind\": \"sysctl\", \"name\": \"%s\", \"wanted\": \"%s\", \"actual\": \"%s\"}", comma, $4, $2, $3 }
        NF { comma = ", " }' \
        "$work/details" "$work/sysctls" >"$work/differences"
    cat "$work"/plan.*/detail "$work/sysctls" >"$work/drift"
    reply=$(wc -l <"$work/drift")
}

# state is what the kernel has, see verb_status.
find_state() {
    local each
    flavour=$r_flavour state=absent
    if [ -z "$r_generation" ]; then
        for each in iptables nftables ipvs userspace; do if "leave_${each}_present"; then state=foreign; fi; done
    elif [ ! -e "$STATE/unsettled" ] && "${r_mode}_look" "$r_generation" $r_dirs; then state=applied
    else
        "${r_mode}_markers" >"$work/markers" || die 4 "$refused"
        if [ ! -s "$work/markers" ]; then state=flushed
        elif grep -q -v " $r_generation\$" "$work/markers"; then state=foreign
        else state=partial
        fi
    fi
}

# Print what a state says of its Services: services.jsonl of the snapshot, then the -/+ lines of the deltas.
verb_show() {
    find_kept "${1:-$r_generation}"
    state_dirs $reply
    for reply in $reply; do cat "$reply"/services.jsonl* 2>/dev/null || :; done
    put_text generation "${1:-$r_generation}" mode "$r_mode" node "$r_node"
    answer
}

# reply is "DIGEST DELTAS" of the kept state whose generation starts with $1, or of the one before the state in force.
find_kept() {
    local each found
    found=''
    case $1 in *[!0-9a-f]*) die 2 "\"$1\" is not a generation" ;; esac
    [ -n "$r_generation" ] || die 2 "no bundle was applied here"
    for each in $r_kept; do
        if [ -z "$1" ] && [ "$each" = "$r_snapshot/$r_deltas/$r_generation" ]; then break; fi
        case ${each##*/} in "$1"*) ;; *) continue ;; esac
        [ -z "$1" ] || [ -z "$found" ] || die 2 "generation $1 is not unique, give more digits"
        found=$each
    done
    kept_generations
    [ -n "$found" ] || die 2 "generation ${1:-before the recorded one} is not kept here; those that are: $reply"
    found=${found%/*}
    reply="${found%/*} ${found#*/}"
}

# Go back: to the state before the one in force, or to the kept one whose generation starts with $1.
verb_rollback() {
    [ -n "$undoing" ] || check_unsigned_verb
    [ -n "$dry_run" ] || lock
    read_note
    if [ -z "$1" ] && [ -n "$u_token" ]; then
        [ -n "$u_previous" ] || die 2 "no bundle was there before the one that waits for its confirmation; cleanup removes it"
        verify=1
        set -- "$u_previous"
    fi
    find_kept "$1"
    replay_state $reply
}

# The kernel becomes bundle $1 with its first $2 deltas, each verified as when it came.
replay_state() {
    local dir base
    state_dirs "$1" "$2"
    dirs=$reply base=$1 previous=$r_generation
    manifest "${dirs##* }" || die 4 "the record ${dirs##* } is damaged: $refused"
    [ "$b_mode" = "$MODES" ] || run_elsewhere "$b_mode"
    # What is recorded and in force was verified when it came.
    if [ "$verb" != restore ] || [ -n "$verify" ] || ! is_current; then
        for dir in $dirs; do
            verify "$dir" || die 4 "the record $dir is damaged: $refused"
            # The snapshot is named by its digest; each delta begins where the one before it ends.
            case $base in "$b_digest" | "$b_base") ;; *) die 4 "the record $dir is damaged: it does not follow $base" ;; esac
            base=$b_generation bundle=$dir
            check_kept_release "$dir"
        done
    fi
    if [ -n "$dry_run" ]; then compare_only; else switch_to "$1" "$2"; fi
}

# Apply the recorded state again, with no help from outside.
verb_restore() {
    lock
    if confirm_overdue; then confirm_undo; return 0; fi
    [ -n "$r_generation" ] || die 2 "no bundle was applied here, there is nothing to restore"
    replay_state "$r_snapshot" "$r_deltas"
}

# Run this verb with the program of mode $1, which left a copy of itself here when it applied a state of that mode.
run_elsewhere() {
    [ -f "$STATE/akp-node.$1" ] || die 3 "what is recorded is of mode $1, this program of mode $MODES (see akp program --mode $1)"
    rm -rf "$work"
    set -- "$STATE/akp-node.$1" "$verb" ${verify:+--verify} ${dry_run:+--dry-run} ${known:+--known "$known"} \
        ${confirm_within:+--confirm-within "$confirm_within"}
    if [ "$verb" = rollback ]; then set -- "$@" "$b_generation"; elif [ -n "$operand" ]; then set -- "$@" "$operand"; fi
    trap - EXIT HUP INT TERM PIPE
    exec sh "$@"
}

# Leave a copy of the program that runs, for run_elsewhere and carriers, and the copy's digest.
keep_program() {
    local copy
    copy=$STATE/akp-node.$b_mode
    if ! runs_from_file || cmp -s "$0" "$copy"; then return 0; fi
    { rm -f "$copy.sum" && copy_file "$0" "$copy" && reply=$(sha256sum <"$copy") && write_file "$copy.sum" "$reply"; } ||
        die 3 "$STATE cannot be written $FULL"
}

# The host is as it was before the first apply; foreign rules are not touched.
verb_cleanup() {
    local each present
    [ -n "$undoing" ] || check_unsigned_verb
    [ -n "$dry_run" ] || lock
    flavour=$r_flavour present=''
    for each in iptables nftables ipvs userspace; do if "leave_${each}_present"; then present="$present $each"; fi; done
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
    rm -rf "$STATE"/record* "$STATE/bundles" "$STATE/before.new" "$STATE/stale" "$STATE/others" "$STATE/draining" \
        "$STATE/undone" "$STATE"/confirmed* "$STATE/pull" "$STATE/queued" "$STATE"/health.* "$STATE"/akp-node.*
    read_record
    health_sync
    # Last, as others may begin then. An undo has yet to say that it came to its end.
    [ -n "$undoing$unfinished" ] || { rm -f "$STATE/lock" && rmdir "$STATE" 2>/dev/null; } || :
}

# Look again at the real servers that were told to leave while they had connections.
verb_drain() {
    lock
    b_mode=$MODES
    "${b_mode}_settle"
    reply=0
    [ ! -s "$STATE/draining" ] || reply=$(wc -l <"$STATE/draining")
    put draining "$reply"
    answer
}

# A change has come that is not in the kernel yet; how long that takes is what health depends on.
sync_begins() { [ -e "$STATE/queued" ] || true 2>/dev/null >"$STATE/queued" || :; }

# Publish what health checks are answered from, if this change brought it.
health_changed() {
    local name news
    [ "$verb" != check ] || return 0
    news='' synced=1 dirs=$r_dirs
    for name in health.conf health.counts; do
        if [ "$verb$b_kind" = applyDelta ] && ! has_file "$name"; then continue; fi
        effective "$name"
        if [ -z "$reply" ]; then continue; fi
        copy_file "$reply" "$STATE/$name" || warn "$STATE/$name could not be written"
        news=1
    done
    [ -z "$news" ] || health_sync
}

# Have akp-health keep the sockets in step. What goes wrong there is a warning: the rules are in.
health_sync() {
    local said
    setting health
    [ -n "$reply" ] && [ -f "$HEALTH" ] && [ -O "$HEALTH" ] && [ ! -L "$HEALTH" ] || return 0
    said=$(AKP_STATE=$STATE AKP_ETC=$ETC sh "$HEALTH" sync 2>&1 </dev/null) || warn "${said##*"$NL"}"
}
