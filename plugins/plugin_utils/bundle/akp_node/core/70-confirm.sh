# shellcheck shell=sh disable=SC2015,SC2034,SC2086,SC2153,SC2154,SC3043
# ---------------------------------------------------------------- Confirm
# A change that may cut its author off is applied with a term: without a confirmation this host goes back by itself. The note of where
# to go back to comes first, then the process that waits, then the change: whatever dies, the undo comes. Time is counted from boot,
# so setting the clock changes nothing. A reboot ends the term.

# Read the note. Its last line makes it whole: without it there is none.
read_note() {
    read_values u "$STATE/unconfirmed" $NOTE
    u_deadline=${u_deadline:-0}
    [ -n "$u_within" ] || u_token='' u_previous=''
}

# True if a change waits for its confirmation, with time left. A boot that cannot be told is not another one.
confirm_waits() {
    read_note
    read -r boot </proc/sys/kernel/random/boot_id || boot=''
    clock
    left=$((u_deadline - now / 100))
    if [ "$left" -lt 0 ] || confirm_rebooted; then left=0; fi
    [ -n "$u_token" ] && [ "$left" -gt 0 ]
}
confirm_rebooted() { [ "${boot:-$u_boot}" != "${u_boot:-$boot}" ]; }

# True if its term passed and it was not undone: its process was killed, or the host rebooted.
confirm_overdue() { ! confirm_waits && [ -n "$u_token" ]; }

# Wait while another change waits for its confirmation: it is as good as a lock. The lock is held.
confirm_turn() {
    while confirm_waits && [ "$u_generation" != "$b_generation" ]; do
        [ "$waited" -lt "$LOCK_WAIT" ] ||
            die 5 "locked: generation $u_generation waits for its confirmation for another $left s (akp-node confirm, akp-node rollback)"
        exec 9>&-
        locked='' waited=$((waited + 1))
        sleep 1
        lock
    done
}

# Arm the undo of what this run is about to do. If an older change was never undone, it goes back to what was before that one.
confirm_arm() {
    [ -n "$confirm_within" ] || return 0
    if confirm_waits && [ "$u_generation" = "$b_generation" ]; then armed=$u_token; return 0; fi
    runs_from_file || confirm_cannot "the program was not started from a file"
    [ -n "$boot" ] || confirm_cannot "/proc/sys/kernel/random/boot_id cannot be read, so a reboot would go unnoticed"
    if [ -n "$u_token" ]; then old_note=$(cat "$STATE/unconfirmed")
    else
        u_previous=$r_generation
        # Without a bundle of ours, what another program has in our place is where an undo leads.
        [ -n "$r_snapshot" ] || { rm -rf "$STATE/foreign" "$STATE/foreign.new" && mkdir "$STATE/foreign.new" &&
            "${b_mode}_keep" "$STATE/foreign.new" && echo "$b_mode" >"$STATE/foreign.new/mode" &&
            mv "$STATE/foreign.new" "$STATE/foreign"; } || confirm_cannot "what is in the kernel cannot be kept in $STATE"
    fi
    read -r u_token </proc/sys/kernel/random/uuid
    armed=$u_token new_arm=1 u_generation=$b_generation u_boot=$boot u_within=$confirm_within
    { copy_file "$0" "$STATE/undo" && confirm_note; } || confirm_cannot "$STATE cannot be written $FULL"
    confirm_start || confirm_cannot "the process that would undo it did not start"
}

# Write down what waits, for as long as was asked for from now on.
confirm_note() {
    clock
    u_deadline=$((now / 100 + u_within))
    write_values u "$STATE/unconfirmed" $NOTE
}

# End before anything was changed.
confirm_cannot() {
    undo_all
    die 3 "--confirm-within is not possible here: $1; nothing was changed"
}

# True if $0 is this program, and not a shell that was given it on stdin.
runs_from_file() { [ -f "$0" ] && grep -q '^# akp-node - ' "$0"; }

# Start the process that waits, and see it: by systemd, which keeps it whatever becomes of this session, or else in a session of its
# own, with nothing left open that a connection could wait for.
confirm_start() {
    local try
    rm -f "$STATE/undo.pid"
    set -- /bin/sh "$STATE/undo" await "$u_token"
    if [ -d /run/systemd/system ] && has systemd-run && initial_namespace; then
        systemd-run --quiet --collect "--unit=akp-undo-$u_token" "--setenv=AKP_STATE=$STATE" "--setenv=AKP_RUN=$RUN" \
            "--setenv=AKP_ETC=$ETC" "--setenv=AKP_KEEP=$KEEP" "--setenv=AKP_IPTABLES=${AKP_IPTABLES:-}" \
            "--setenv=PATH=$PATH" "$@" >/dev/null 2>&1 || :
    else
        ! has setsid || set -- setsid "$@"
        (trap '' HUP; cd /; exec "$@") </dev/null >/dev/null 2>&1 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&- &
    fi
    for try in .05 .05 .05 .05 .05 .05 .1 .1 .5 1 1 1 1 1 1 1; do
        ! confirm_guarded || return 0
        sleep "0$try" 2>/dev/null || sleep 1
    done
    confirm_guarded
}

# True if the process that waits is there, and is no zombie.
confirm_guarded() {
    local pid stat
    pid='' stat=''
    read -r pid 2>/dev/null <"$STATE/undo.pid" && read -r stat 2>/dev/null <"/proc/$pid/stat" || :
    case $stat in '' | *') Z '*) return 1 ;; esac
}

# The end of a change that succeeded: its own term begins, and an older one ends.
confirm_end() {
    if [ -n "$undoing" ] || [ "$verb" = check ]; then return 0; fi
    if [ -n "$new_arm" ] && [ "$changed$old_note" != false ]; then
        confirm_note
        confirm_guarded || confirm_start || warn "nothing waits to undo this change; without a confirmation the next restore does"
    elif [ -n "$new_arm" ]; then confirm_disarm
    elif [ -z "$armed" ] && [ -f "$STATE/unconfirmed" ]; then
        if ! confirm_waits || [ "$verb" = rollback ] || [ "$u_generation" != "$b_generation" ]; then confirm_disarm; fi
    fi
    ! forward || [ ! -e "$STATE/undone" ] || rm -f "$STATE/undone"
}

# Nothing waits any more. The process sees it within a second, and ends.
confirm_disarm() {
    rm -f "$STATE/unconfirmed"
    rm -rf "$STATE/undo" "$STATE/undo.pid" "$STATE/undo.log" "$STATE/foreign"
    armed='' new_arm=''
}

# A run that failed and left everything as it was leaves nothing to undo but what was there to undo before.
confirm_failed() {
    [ -n "$new_arm" ] && [ -n "$answered" ] && [ "$as_before" = true ] || return 0
    if [ -z "$old_note" ]; then confirm_disarm; else write_file "$STATE/unconfirmed" "$old_note" && rm -f "$STATE/undo.pid"; fi
}

# Say in the answer of status what waits, and what was undone last.
confirm_status() {
    local waiting undone overdue
    waiting=null undone=null overdue=false
    confirm_waits || overdue=true
    json "$u_previous"
    [ -z "$u_token" ] || waiting="{\"generation\": \"$u_generation\", \"previous\": $reply, \"seconds\": $left, \"overdue\": $overdue}"
    read_values d "$STATE/undone" $UNDONE
    json "$d_reason"
    [ -z "$d_generation" ] || undone="{\"generation\": \"$d_generation\", \"reason\": $reply, \"at\": $d_time}"
    put unconfirmed "$waiting" undone "$undone"
}

# The author of the change can still reach this host: the change stays.
verb_confirm() {
    [ -d "$STATE" ] || die 2 "nothing was applied here, there is nothing to confirm"
    lock
    read_note
    b_mode=$r_mode
    if [ -n "$u_token" ]; then
        [ "${1:-$u_token}" = "$u_token" ] || die 2 "that is not the token of the change that waits, generation $u_generation"
        [ "$r_generation" = "$u_generation" ] || die 2 "the apply of $u_generation did not come to its end; it will be undone"
        write_file "$STATE/confirmed" "$u_token"
        confirm_disarm
        [ ! -e "$STATE/others" ] || leave_other_modes
        [ -z "$unfinished" ] || die 4 "the change stays, but what another mode has in the kernel could not be removed (see the warnings)"
        changed=true
    elif [ "${1:-none}" != "$(cat "$STATE/confirmed" 2>/dev/null)" ]; then
        read_values d "$STATE/undone" $UNDONE
        [ -z "$d_generation" ] || die 2 "too late: generation $d_generation was undone, as it was not confirmed; apply it again"
        die 2 "nothing waits for a confirmation here"
    fi
    put changed "$changed"
    put_text generation "$r_generation"
    answer
}

# Wait until the term of the change $1 is over, and undo it unless it was confirmed. There is no last try: whatever is in the way of an
# undo may go away at any time.
verb_await() {
    local tries
    tries=0
    echo "$$" >"$STATE/undo.pid"
    while confirm_waits || [ "$u_token" = "$1" ]; do
        [ "$u_token" = "$1" ] || return 0
        if [ "$left" -gt 0 ]; then sleep 1
        # A process of its own, so that one that fails is tried again.
        elif ! sh "$0" undo "$1" >"$STATE/undo.log" 2>&1; then
            [ "$tries" -ge 60 ] || tries=$((tries + 1))
            sleep "$tries"
        fi
    done
}

# Undo the change with the token $1, unless it was confirmed.
verb_undo() {
    lock
    if [ -n "$1" ] && confirm_overdue && [ "$u_token" = "$1" ]; then confirm_undo; else put changed false; answer; fi
}

# Go back to what was there before the change that was not confirmed, and note that. The lock is held, the note read.
confirm_undo() {
    local undone back reason
    undone=$u_generation back=$u_previous reason="not confirmed within $u_within s" verify=1 undoing=1
    ! confirm_rebooted || reason="not confirmed before the host was rebooted"
    if [ -n "$back" ]; then verb_rollback "$back"; else verb_cleanup; fi
    epoch
    d_generation=$undone d_reason=$reason d_time=$reply
    write_values d "$STATE/undone" $UNDONE
    confirm_disarm
    say "generation $undone was $reason: undone"
    ! has logger || logger -t akp-node "generation $undone was $reason: undone, back to ${back:-nothing}" 2>/dev/null || :
}
