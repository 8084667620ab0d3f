# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Commit-confirmed
# A change that may cut its author off is applied with a term: if nobody confirms it, this host goes back by itself.
# The order is: start the process that waits, note where to go back to, and only then touch the kernel. So whatever
# dies afterwards - this run, the carrier, its connection - the undo comes. In the state directory:
#   unconfirmed   key=value: token, generation, previous (to go back to; empty for nothing), boot, deadline
#   undo, undo.pid, undo.log   the program as it was when it armed itself, who waits, what the last try said
#   foreign/      what another program had in our place, if no bundle of ours was there before
#   undone        key=value: the last change that nobody confirmed
#   confirmed     token of the last one that was
# Time is counted from boot, so setting the clock changes nothing. A reboot ends the term.
confirm_within=
armed=         # token of the change that this run applies
new_arm=       # this run armed it
rearmed=       # a change whose term had passed unnoticed was there
undoing=       # this run undoes a change that nobody confirmed

# A value of the change that waits for its confirmation; empty if none does.
unconfirmed() { value_from "$STATE/unconfirmed" "$1"; }

# This boot, in $boot; empty if it cannot be told. By the shell itself: a tool that fails would make it another one.
boot_id() {
    boot=
    read -r boot </proc/sys/kernel/random/boot_id || :
}

# Was the host rebooted since the change was noted? Only if both boots are known, and are not the same.
confirm_rebooted() {
    boot_id
    noted=$(unconfirmed boot)
    [ -n "$boot" ] && [ -n "$noted" ] && [ "$boot" != "$noted" ]
}

# Does a change wait for its confirmation, with time left? $left are the seconds.
confirm_waits() {
    left=0
    [ -f "$STATE/unconfirmed" ] && ! confirm_rebooted || return 1
    now
    left=$(unconfirmed deadline)
    left=$((${left:-0} - now / 100))
    [ "$left" -gt 0 ]
}

# Is there a note of a change that waits, a whole one? The last line says so: without it nothing tells where to go back to.
confirm_noted() { [ -f "$STATE/unconfirmed" ] && [ -n "$(unconfirmed within)" ]; }

# Has the term of a change passed without anybody undoing it? Its process was killed, or the host rebooted.
confirm_overdue() { confirm_noted && ! confirm_waits; }

# A change of somebody else that waits for its confirmation is as good as a lock. Called with the lock held.
confirm_turn() {
    case $verb in rollback | restore | undo) return 0 ;; esac
    while confirm_waits && [ "$(unconfirmed generation)" != "$generation" ]; do
        [ "$waited" -lt "$LOCK_WAIT" ] || die 5 "locked: generation $(unconfirmed generation) waits for its confirmation for another $left s; confirm it (akp-node confirm), go back (akp-node rollback), or try again later"
        unlock
        waited=$((waited + 1))
        sleep 1
        lock
    done
}

# Arm the undo of what this run is about to do, if that was asked for.
confirm_arm() {
    [ -n "$confirm_within" ] || return 0
    if confirm_waits && [ "$(unconfirmed generation)" = "$generation" ]; then
        armed=$(unconfirmed token)
        return 0
    fi
    runs_from_file || confirm_cannot "the program was not started from a file"
    boot_id
    [ -n "$boot" ] || confirm_cannot "/proc/sys/kernel/random/boot_id cannot be read, so a reboot would go unnoticed"
    if confirm_noted; then
        back=$(unconfirmed previous)
        rearmed=1
        cp "$STATE/unconfirmed" "$work/unconfirmed" || confirm_cannot "${TMPDIR:-/tmp} cannot be written (is the disk full?)"
    else
        back=
        recorded_bundle
        [ -z "$recorded" ] || back=$previous
        [ -n "$back" ] || confirm_note_foreign || confirm_cannot "what is in the kernel cannot be kept in $STATE"
    fi
    read -r armed </proc/sys/kernel/random/uuid
    new_arm=1
    { cp "$0" "$STATE/undo.new" && mv "$STATE/undo.new" "$STATE/undo"; } || confirm_cannot "$STATE cannot be written (is the disk full?)"
    confirm_start || confirm_cannot "the process that would undo it did not start"
    # Last, so that whoever dies before leaves nothing that would have to be undone and cannot be.
    confirm_note || confirm_cannot "$STATE cannot be written (is the disk full?)"
    confirm_guarded || confirm_cannot "the process that would undo it has ended"
}

# Write down what waits, for as long as was asked for from now on.
confirm_note() {
    now
    printf 'token=%s\ngeneration=%s\nprevious=%s\nboot=%s\ndeadline=%s\nwithin=%s\n' \
        "$armed" "$generation" "$back" "$boot" $((now / 100 + confirm_within)) "$confirm_within" >"$STATE/unconfirmed.new" &&
        mv "$STATE/unconfirmed.new" "$STATE/unconfirmed"
}

# End before anything was changed.
confirm_cannot() {
    undo_all
    die 3 "--confirm-within is not possible here: $1; nothing was changed"
}

# Start the process that waits: by systemd, which keeps it whatever becomes of this session, or else in a session of
# its own, with nothing left open that a connection could wait for. True when it is there.
confirm_start() {
    rm -f "$STATE/undo.pid"
    if [ -d /run/systemd/system ] && has systemd-run && initial_namespace; then
        set -- "--setenv=PATH=$PATH" "--setenv=AKP_STATE=$STATE" "--setenv=AKP_KEEP=$KEEP"
        [ -z "${AKP_IPTABLES:-}" ] || set -- "$@" "--setenv=AKP_IPTABLES=$AKP_IPTABLES"
        [ -z "${AKP_ETC:-}" ] || set -- "$@" "--setenv=AKP_ETC=$AKP_ETC"
        systemd-run --quiet --collect "--unit=akp-undo-$armed" "$@" /bin/sh "$STATE/undo" await "$armed" >/dev/null 2>&1 && confirm_started && return 0
    fi
    set -- sh "$STATE/undo" await "$armed"
    ! has setsid || set -- setsid "$@"
    (
        trap '' HUP
        cd /
        exec "$@"
    ) </dev/null >/dev/null 2>&1 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&- &
    confirm_started
}

confirm_started() {
    for try in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        [ ! -s "$STATE/undo.pid" ] || return 0
        if [ "$try" -lt 12 ]; then sleep 0.05 2>/dev/null || sleep 1; else sleep 1; fi
    done
    return 1
}

# The process that is known to wait, in $waiter; empty if none is.
confirm_waiter() {
    waiter=
    [ ! -e "$STATE/undo.pid" ] || read -r waiter 2>/dev/null <"$STATE/undo.pid" || :
}

# Is it still there? One that has ended, and that nobody has looked after yet, is not.
confirm_guarded() {
    confirm_waiter
    stat=
    [ -z "$waiter" ] || read -r stat 2>/dev/null <"/proc/$waiter/stat" || :
    case $stat in '' | *') Z '*) return 1 ;; esac
}

# Keep what another program has in our place: without a bundle of ours to go back to, that is where an undo leads.
confirm_note_foreign() {
    rm -rf "$STATE/foreign" "$STATE/foreign.new"
    mkdir "$STATE/foreign.new" || return 1
    if [ "$mode" = nftables ]; then iptables_read; fi
    for fam in $FAMILIES; do iptables_owned <"$work/actual.$fam" >"$STATE/foreign.new/iptables.$fam" || return 1; done
    printf '%s\n' "$flavour" >"$STATE/foreign.new/flavour" || return 1
    if [ "$mode" = nftables ]; then flavour='' flavour_trouble=; fi
    if nft_tables_exist; then
        nft_list >"$STATE/foreign.new/nft" || return 1
        for f in $NFT_FAMILIES; do nft list table "$f" kube-proxy-generation 2>/dev/null || :; done >>"$STATE/foreign.new/nft"
    fi
    ! ipvs_present || ipvs_save "$STATE/foreign.new/ipvs" || return 1
    mv "$STATE/foreign.new" "$STATE/foreign"
}

# Was this kind of state of another program there? Only an undo asks.
foreign_noted() { [ -n "$undoing" ] && [ -s "$STATE/foreign/$1" ]; }

# The end of a change that succeeded: its own term begins, and an older one ends.
confirm_end() {
    [ -z "$undoing" ] || return 0
    if [ -n "$armed" ]; then
        if [ -z "$new_arm" ]; then :
        elif [ "$1" = false ] && [ -z "$rearmed" ]; then confirm_disarm
        else
            back=$(unconfirmed previous)
            confirm_note
            confirm_guarded || confirm_start || warn "the process that would undo this change has ended; without a confirmation the next restore goes back"
        fi
    elif [ -f "$STATE/unconfirmed" ]; then
        if [ "$verb" = rollback ] || ! confirm_waits || [ "$(unconfirmed generation)" != "$generation" ]; then confirm_disarm; fi
    fi
    case $verb in rollback | restore) ;; *) [ ! -e "$STATE/undone" ] || rm -f "$STATE/undone" ;; esac
}

# Nothing waits any more. The process sees it within a second, and ends.
confirm_disarm() {
    rm -f "$STATE/unconfirmed"
    rm -rf "$STATE/undo" "$STATE/undo.pid" "$STATE/undo.log" "$STATE/foreign"
    armed='' new_arm=
}

# A run that failed and left everything as it was leaves nothing to undo but what was there to undo before. If that cannot be
# noted, this run's own note stays, which leads to the same place.
confirm_failed() {
    [ "$as_before" = true ] || return 0
    if [ -z "$rearmed" ]; then
        confirm_disarm
    elif cp "$work/unconfirmed" "$STATE/unconfirmed.new" && mv "$STATE/unconfirmed.new" "$STATE/unconfirmed"; then
        rm -f "$STATE/undo.pid"
        armed='' new_arm=
    fi
}

# The change, for the answer of apply.
confirm_answer() {
    [ -n "$confirm_within" ] || return 0
    if [ -z "$armed" ] && confirm_waits && [ "$(unconfirmed generation)" = "$generation" ]; then armed=$(unconfirmed token); fi
    if [ -n "$armed" ] && confirm_waits; then printf '"confirm": "%s", "confirmWithin": %d, ' "$armed" "$left"
    else printf '"confirm": null, "confirmWithin": null, '
    fi
}

# The same for status.
confirm_status() {
    if [ -f "$STATE/unconfirmed" ]; then
        overdue=false
        confirm_waits || overdue=true
        printf '"unconfirmed": {"generation": "%s", "previous": %s, "seconds": %d, "overdue": %s}, ' \
            "$(unconfirmed generation)" "$(json_or_null "$(unconfirmed previous)")" "$((left > 0 ? left : 0))" "$overdue"
    else
        printf '"unconfirmed": null, '
    fi
    if [ -f "$STATE/undone" ]; then
        printf '"undone": {"generation": "%s", "reason": %s, "at": %d}, ' \
            "$(value_from "$STATE/undone" generation)" "$(json_string "$(value_from "$STATE/undone" reason)")" "$(value_from "$STATE/undone" time)"
    else
        printf '"undone": null, '
    fi
}

# Whoever applied it can still reach this host: the change stays.
verb_confirm() {
    [ -d "$STATE" ] || die 2 "nothing was applied here, there is nothing to confirm"
    lock
    token=$(unconfirmed token)
    changed=true
    if [ -z "$token" ]; then
        if [ -z "$1" ] || [ "$1" != "$(cat "$STATE/confirmed" 2>/dev/null)" ]; then
            [ ! -f "$STATE/undone" ] || die 2 "too late: generation $(value_from "$STATE/undone" generation) was undone, as it was $(value_from "$STATE/undone" reason); apply it again"
            die 2 "nothing waits for a confirmation here"
        fi
        changed=false
    else
        [ -z "$1" ] || [ "$1" = "$token" ] || die 2 "that is not the token of the change that waits for its confirmation, generation $(unconfirmed generation)"
        [ "$r_generation" = "$(unconfirmed generation)" ] ||
            die 2 "the apply of generation $(unconfirmed generation) did not come to its end; it will be undone, or at once by akp-node rollback"
        printf '%s\n' "$token" >"$STATE/confirmed.new"
        mv "$STATE/confirmed.new" "$STATE/confirmed"
        confirm_disarm
    fi
    elapsed
    printf '{"verb": "confirm", "ok": true, "changed": %s, "generation": "%s", "seconds": %s, "warnings": [%s]}\n' \
        "$changed" "$r_generation" "$elapsed" "$warnings"
}

# Wait until the term of the change $1 is over, and undo it unless it was confirmed. Runs by itself.
verb_await() {
    printf '%s\n' "$$" >"$STATE/undo.pid"
    # It is noted once this process is known to be there, which on a busy host takes its time.
    now
    latest=$((now + 30000))
    while [ "$(unconfirmed token)" != "$1" ]; do
        confirm_waiter
        now
        # Confirmed that quickly, or never begun; or another process has taken the place of this one.
        if [ "$waiter" != "$$" ] || [ "$now" -gt "$latest" ]; then return 0; fi
        sleep 0.2 2>/dev/null || sleep 1
    done
    tries=0
    while [ "$(unconfirmed token)" = "$1" ]; do
        if confirm_waits; then
            sleep 1
            continue
        fi
        # A process of its own, so that one that fails is tried again.
        if sh "$0" undo "$1" >"$STATE/undo.log" 2>&1; then continue; fi
        # Whatever is in the way, a full disk or another run, may go away at any time: there is no last try.
        [ "$tries" -ge 60 ] || tries=$((tries + 1))
        sleep "$tries"
    done
}

# Undo the change with the token $1, unless it was confirmed.
verb_undo() {
    lock
    if [ -n "$1" ] && [ "$(unconfirmed token)" = "$1" ] && confirm_overdue; then
        confirm_undo
        return 0
    fi
    elapsed
    printf '{"verb": "undo", "ok": true, "changed": false, "seconds": %s, "warnings": [%s]}\n' "$elapsed" "$warnings"
}

# Go back to what was there before the change that nobody confirmed, and note that. The lock is held. Without a note there
# is nothing to undo: no previous generation would mean that everything goes.
confirm_undo() {
    confirm_noted || die 3 "no change waits for its confirmation, so nothing was undone"
    undone=$(unconfirmed generation) back=$(unconfirmed previous)
    reason="not confirmed within $(unconfirmed within) s"
    ! confirm_rebooted || reason="not confirmed before the host was rebooted"
    verify=1 undoing=1 trusted=1
    if [ -n "$back" ]; then go_back_to "$back"; else verb_cleanup; fi
    printf 'generation=%s\nreason=%s\ntime=%s\n' "$undone" "$reason" "$(date +%s)" >"$STATE/undone.new"
    mv "$STATE/undone.new" "$STATE/undone"
    confirm_disarm
    say "generation $undone was $reason: undone"
    ! has logger || logger -t akp-node "generation $undone was $reason: undone, back to ${back:-nothing}" 2>/dev/null || :
}

# Apply the kept generation $1, which may be the recorded one.
go_back_to() {
    if [ "$r_generation" = "$1" ]; then
        settle
        recorded_bundle
        verb_apply "$recorded"
    else
        verb_rollback "$1"
    fi
}
