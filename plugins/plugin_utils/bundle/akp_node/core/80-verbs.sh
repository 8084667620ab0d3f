# shellcheck shell=sh disable=SC1091,SC2015,SC2034,SC2086,SC2153,SC2154,SC3043
# ---------------------------------------------------------------- Verbs
# A mode M is a set of functions M_..., listed in docs/node-program.md; the verbs know no other.

# The kernel becomes the bundle, or goes where the delta leads.
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

# What apply would do; nothing is written.
verb_check() { verb_apply "$1"; }

# End with 2 if more than $max_removed percent of the service ports, or all endpoints, would go. The numbers are signed.
check_shrink() {
    local lost
    if [ -z "$r_generation" ] || [ "${max_removed:-100}" -ge 100 ]; then return 0; fi
    lost=$((r_ports - b_ports)) reply=''
    [ $((lost * 100)) -le $((max_removed * r_ports)) ] || reply="$lost of $r_ports service ports would be removed, more than $max_removed %"
    [ "$b_endpoints" -gt 0 ] || [ "$r_endpoints" -eq 0 ] || reply="none of $r_endpoints endpoints would be left"
    [ -z "$reply" ] || die 2 "refused: $reply. If that is meant, allow it with --max-removed 100 (kube_proxy_max_removed_percent)"
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
    closed_state
    sync_begins
    make_plan
    [ -e "$STATE/before/$b_mode" ] || { need_leave; remember; }
    keep_bundle
    keep_program
    confirm_arm
    # A run that is cut short while it changes the mode leaves both in the kernel; the next one cleans up.
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

# The end of a change, or of none: the release counts, terms begin or end, health checks follow, and the answer.
end_change() {
    note_release
    confirm_end
    health_changed
    print_change
}

# Remove what other modes have in the kernel, ours or kube-proxy's, once the new rules are in: until then both serve.
leave_other_modes() {
    [ "$r_mode" != "$b_mode" ] || [ -e "$STATE/unsettled" ] || [ -e "$STATE/others" ] || return 0
    # Another program's rules stay until the first change of ours is confirmed.
    if [ -n "$armed" ] && [ -z "$r_snapshot" ]; then : >"$STATE/others"; return 0; fi
    if read_leave; then leave_others; else warn "akp-leave is not here, so what other modes may have in the kernel stays"; fi
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
        if "${b_mode}_look" "$b_base" $r_dirs; then print_change; return 0; fi
        need_full "the kernel does not have generation $b_base"
    fi
    sync_begins
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
    # It is on the disk of the record already; what a kill leaves here, the next whole bundle puts right.
    keep_bundle
    dirs="$r_dirs $bundle"
    "${b_mode}_settle"
    flows_apply delete
    record_state "$r_snapshot" $((r_deltas + 1))
    end_change
}

# End because only a whole bundle will do: no failure, and nothing was changed unless the answer says so.
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
    set -- "$work"/plan.*/counts
    [ ! -e "$1" ] || put chains "{$(list "$@")}"
    reply=$("${b_mode}_report")
    members="$members${reply:+, }${reply%, }"
    put deltas "$r_deltas" sysctls "$changed_sysctls" flows "$flows"
    if [ -n "$confirm_within" ]; then
        confirm_waits && [ "$u_generation" = "$b_generation" ] || u_token='' left=null
        put_text confirm "$u_token"
        put confirmWithin "$left"
    fi
    [ "$verb$verify" != check1 ] || put differences "[$(list "$work"/plan.*/detail)]"
    answer
}

# Compare the kernel with $dirs, and print the answer.
compare_only() {
    make_plan
    sysctls_differ "$r_unset"
    changed_sysctls=$(wc -l <"$work/sysctls")
    flows_apply count
    if "${b_mode}_pending" || [ "$changed_sysctls" -gt 0 ] || [ "$r_generation" != "$b_generation" ]; then changed=true; fi
    print_change
}

# Compare the kernel with $dirs. Ends with 3 if a tool is missing or, before the first bundle of the mode, a kernel feature.
make_plan() {
    "${b_mode}_read"
    "${b_mode}_preflight"
    [ "$r_mode" = "$b_mode" ] || { need_leave; "${b_mode}_features"; }
    "${b_mode}_plan" $dirs
}

verb_status() { status_members; answer; }

# Put the state, and with --verify every difference from the record, into the answer; docs/node-program.md lists the states.
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
    put drift "$drift" differences "[$(list "$work/drift")]"
}

# reply is how many differences there are between the kernel and the record; $work/drift has them, a line of JSON each.
find_drift() {
    b_mode=$r_mode dirs=$r_dirs flavour=$r_flavour
    "${b_mode}_read"
    "${b_mode}_plan" $r_dirs
    sysctls_differ "$r_unset"
    cat "$work"/plan.*/detail >"$work/drift"
    awk "$quote_awk"'{ print "{\"kind\": \"sysctl\"" member("name", $4) member("wanted", $2) member("actual", $3) "}" }' "$work/sysctls" >>"$work/drift"
    reply=$(wc -l <"$work/drift")
}

# state is what the kernel has.
find_state() {
    flavour=$r_flavour state=absent
    if [ -z "$r_generation" ]; then
        if read_leave; then leave_present; else warn "akp-leave is not here, so rules of a kube-proxy were not looked for"; reply=''; fi
        [ -z "$reply" ] || state=foreign
    elif [ ! -e "$STATE/unsettled" ] && "${r_mode}_look" "$r_generation" $r_dirs; then state=applied
    else
        "${r_mode}_markers" >"$work/markers" || die 4 "$refused"
        if [ ! -s "$work/markers" ]; then state=flushed
        elif grep -q -v " $r_generation\$" "$work/markers"; then state=foreign
        else state=partial
        fi
    fi
}

# Print what a state says of its Services: services.jsonl of the snapshot, then -/+ lines of the deltas.
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

# The kernel becomes bundle $1 with its first $2 deltas. Each is verified as when it came, unless a restore finds all in force.
replay_state() {
    local dir base
    state_dirs "$1" "$2"
    dirs=$reply base=$1 previous=$r_generation
    manifest "${dirs##* }" || die 4 "the record ${dirs##* } is damaged: $refused"
    [ "$b_mode" = "$MODES" ] || run_elsewhere "$b_mode"
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

# Apply the recorded state again.
verb_restore() {
    lock
    if confirm_overdue; then confirm_undo; return 0; fi
    [ -n "$r_generation" ] || die 2 "no bundle was applied here, there is nothing to restore"
    replay_state "$r_snapshot" "$r_deltas"
}

# Run this verb with the program of mode $1, which left a copy of itself here.
run_elsewhere() {
    closed_state
    [ -f "$STATE/akp-node.$1" ] || die 3 "what is recorded is of mode $1, this program of mode $MODES (see akp program --mode $1)"
    rm -rf "$work"
    set -- "$STATE/akp-node.$1" "$verb" ${verify:+--verify} ${dry_run:+--dry-run} ${known:+--known "$known"} \
        ${confirm_within:+--confirm-within "$confirm_within"}
    if [ "$verb" = rollback ]; then set -- "$@" "$b_generation"; elif [ -n "$operand" ]; then set -- "$@" "$operand"; fi
    trap - EXIT HUP INT TERM PIPE
    exec sh "$@"
}

# Read the akp-leave that was made with this program, wherever it lies. False if it is not there; need_leave ends with 3.
read_leave() {
    local file
    [ -z "$leave_read" ] || return 0
    for file in "${0%/*}/akp-leave" "$bundle/akp-leave" "$STATE/akp-leave.$MODES" "$STATE"/bundles/*/akp-leave /usr/local/sbin/akp-leave; do
        [ -f "$file" ] && cp "$file" "$work/leave" 2>/dev/null || continue
        case $(sha256sum <"$work/leave") in "$LEAVE "*) . "$work/leave"; leave_read=1; return 0 ;; esac
    done
    return 1
}
need_leave() { read_leave || die 3 "missing program: akp-leave of this akp-node, to be put beside it (see akp program --part leave)"; }

# Leave a copy of the program that runs, for run_elsewhere and carriers, and the copy's digest.
keep_program() {
    local copy
    copy=$STATE/akp-node.$b_mode
    if ! runs_from_file || cmp -s "$0" "$copy"; then return 0; fi
    { rm -f "$copy.sum" && { ! read_leave || copy_file "$work/leave" "$STATE/akp-leave.$b_mode"; } &&
        copy_file "$0" "$copy" && reply=$(sha256sum <"$copy") && write_file "$copy.sum" "$reply"; } || die 3 "$STATE cannot be written $FULL"
}

# The host is as it was before the first apply; foreign rules are not touched.
verb_cleanup() {
    [ -n "$undoing" ] || check_unsigned_verb
    [ -n "$dry_run" ] || lock
    need_leave
    cleanup
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

# A change has come that is not in the kernel yet: health depends on how long that takes.
sync_begins() { [ -e "$STATE/queued" ] || true 2>/dev/null >"$STATE/queued" || :; }

# Publish what health checks are answered from, if this change brought it.
health_changed() {
    local name news
    [ "$verb" != check ] || return 0
    news='' synced=1 dirs=$r_dirs
    for name in health.conf health.counts; do
        if [ "$verb$b_kind" = applyDelta ] && ! has_file "$name"; then continue; fi
        effective "$name"
        [ -z "$reply" ] || { news=1; copy_file "$reply" "$STATE/$name"; } || warn "$STATE/$name could not be written"
    done
    [ -z "$news" ] || health_sync
}

# Have akp-health keep the sockets in step. What goes wrong there is a warning.
health_sync() {
    local said
    setting health
    [ -n "$reply" ] && [ -f "$HEALTH" ] && [ -O "$HEALTH" ] && [ ! -L "$HEALTH" ] || return 0
    said=$(AKP_STATE=$STATE AKP_ETC=$ETC sh "$HEALTH" sync 2>&1 </dev/null) || warn "${said##*"$NL"}"
}
