# shellcheck shell=sh disable=SC2034,SC2086,SC2154,SC3043
# ---------------------------------------------------------------- Record
# docs/node-program.md lists the files of the state directory. A note is lines KEY=value, in variables of one prefix.
RECORD='snapshot deltas generation mode node flavour time ports endpoints unset kept'    # r_*; kept: words DIGEST/DELTAS/GENERATION
NOTE='token generation previous boot deadline within'    # u_*, see confirm
UNDONE='generation reason time'                           # d_*

# Take the lock, which ends with the process; remove what killed runs left, and read the record. Or end with 5.
lock() {
    local name pid
    [ -z "$locked" ] || return 0
    need flock util-linux
    while :; do
        own_directory "$STATE"
        # A cleanup that ended just now has removed the file, and a lock on it counts nothing.
        { command exec 9>>"$STATE/lock"; } 2>/dev/null || { [ ! -d "$STATE" ] && continue; } || die 3 "$STATE cannot be written $FULL"
        # shellcheck disable=SC3013 # dash and busybox have it
        if flock -n 9 && [ "$STATE/lock" -ef /proc/self/fd/9 ]; then break; fi
        [ "$waited" -lt "$LOCK_WAIT" ] || die 5 "locked: another run holds $STATE/lock, gave up after $LOCK_WAIT s"
        waited=$((waited + 1))
        sleep 1
    done
    locked=1
    for name in "$RUN"/[0-9]*.* "$STATE"/in.[0-9]*; do
        pid=${name##*/} pid=${pid#in.}
        if [ -d "$name" ] && [ ! -d "/proc/${pid%%.*}" ]; then rm -rf "$name"; fi
    done
    read_record
}

# Read a note: $1_KEY is the value of each KEY after file $2, or empty.
read_values() {
    local prefix file key value
    prefix=$1 file=$2
    shift 2
    for key; do eval "${prefix}_$key=''"; done
    [ ! -f "$file" ] || while IFS='=' read -r key value; do
        case " $* " in *" $key "*) eval "${prefix}_$key=\$value" ;; esac
    done <"$file"
}

# Write a note: the other way round.
write_values() {
    local prefix file key text
    prefix=$1 file=$2 text=''
    shift 2
    for key; do eval "text=\"\${text}$key=\$${prefix}_$key\$NL\""; done
    write_file "$file" "${text%"$NL"}"
}

# Read the record into r_*. All of them are empty if there is none, or its snapshot is gone.
read_record() {
    read_values r "$STATE/record" $RECORD
    [ -d "$STATE/bundles/${r_snapshot:-none}" ] || read_values r '' $RECORD
    r_deltas=${r_deltas:-0} r_ports=${r_ports:-0} r_endpoints=${r_endpoints:-0} r_dirs=''
    [ -z "$r_snapshot" ] || { state_dirs "$r_snapshot" "$r_deltas"; r_dirs=$reply; }
    if [ -e "$STATE/unsettled" ]; then flows_due=1; else flows_due=''; fi
}

# reply is the directories of the state that bundle $1 and its first $2 deltas make.
state_dirs() {
    local i
    i=1 reply=$STATE/bundles/$1
    while [ "$i" -le "$2" ]; do reply="$reply $STATE/bundles/$1/log/$i" i=$((i + 1)); done
}

# Move the incoming bundle to its place, before the kernel is touched. The record does not name it yet.
keep_bundle() {
    case $bundle in "$STATE"/in.*) ;; *) return 0 ;; esac
    kept_now=$STATE/bundles/$b_digest
    [ "$b_digest" != "$r_snapshot" ] || { kept_now=''; return 0; }
    if [ "$b_kind" = Delta ]; then kept_now=$STATE/bundles/$r_snapshot/log/$((r_deltas + 1)); fi
    # After a kill something may be there that no record names.
    [ ! -e "$kept_now" ] || rm -rf "$kept_now"
    { { [ -d "${kept_now%/*}" ] || mkdir -p "${kept_now%/*}"; } && { [ "$b_kind" = Delta ] || mkdir "$bundle/log"; } &&
        mv "$bundle" "$kept_now"; } || die 3 "the bundle cannot be kept in $STATE $FULL"
    bundle=$kept_now
    [ "$b_kind" = Delta ] || dirs=$bundle
}

# True if this run goes to something new, not back.
forward() { case $verb in rollback | restore | undo) return 1 ;; esac; }

# Record bundle $1 with its first $2 deltas, which b_* describe. Each state that rollback can reach is listed once, the one that is
# replaced last but one; what a new log overwrites is not. The last $KEEP stay, the one in force, and the one that an undo would go
# back to; bundles that the record no longer names are removed.
record_state() {
    local each kept new snapshot deltas old count
    snapshot=$1 deltas=$2 new=$1/$2/$b_generation old=$r_snapshot/$r_deltas/$r_generation kept=''
    if forward; then
        set --
        for each in ${r_kept%%"$old"*} ${r_kept#*"$old"} ${r_snapshot:+$old}; do
            count=${each#*/} count=${count%/*}
            case $each in */"$b_generation") continue ;; "$snapshot"/*) [ "$count" -lt "$deltas" ] || continue ;; esac
            set -- "$@" "$each"
        done
    else set -- $r_kept
    fi
    case " $* " in *" $new "*) ;; *) set -- "$@" "$new" ;; esac
    read_note
    for each; do
        if [ $# -le "$KEEP" ] || [ "$each" = "$new" ] || [ "${each##*/}" = "${u_previous:-none}" ]; then kept="$kept${kept:+ }$each"; fi
        shift
    done
    epoch
    r_snapshot=$snapshot r_deltas=$deltas r_generation=$b_generation r_mode=$b_mode r_node=$b_node r_flavour=$flavour r_time=$reply
    r_ports=$b_ports r_endpoints=$b_endpoints r_unset=$unset_sysctls r_kept=$kept
    write_values r "$STATE/record" $RECORD
    read_record
    if [ -z "$unfinished$stays" ] && [ -e "$STATE/unsettled" ]; then rm -f "$STATE/unsettled"; fi
    for each in "$STATE/bundles"/*; do
        case " $r_kept" in *" ${each##*/}/"*) ;; *) [ ! -e "$each" ] || rm -rf "$each" ;; esac
    done
    kept_now=''
}

# reply is the generations that rollback can reach and the one in force, quoted, the oldest first.
kept_generations() {
    local each list
    list=''
    for each in $r_kept; do list="$list${list:+, }\"${each##*/}\""; done
    reply=$list
}

