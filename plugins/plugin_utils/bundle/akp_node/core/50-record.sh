# shellcheck shell=sh disable=SC2034,SC2086,SC2154,SC3043
# ---------------------------------------------------------------- Record
#   lock        held by the verbs that write
#   record      key=value: what is in force; kept: the states that rollback can reach, words DIGEST/DELTAS/GENERATION
#   bundles/    DIGEST/ is a bundle as it came, DIGEST/log/1, 2, ... the deltas taken since, as they came
#   in.PID/     what a run is taking
#   unsettled   a run was cut short or could not finish: the next one looks at everything and takes no delta
#   before/     what cleanup has to put back
#   health.*    copies of what is in force, for akp-health; queued: a change has come and is not in the kernel yet

# Take the lock, which ends with the process; remove what killed runs left, and read the record. Or end with 5.
lock() {
    local name pid
    [ -z "$locked" ] || return 0
    need flock util-linux
    while :; do
        own_directory "$STATE"
        # A cleanup that ended just now has removed the file: then the lock is on nothing, even if another run has made a new one.
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

unlock() {
    exec 9>&-
    locked=''
}

# Read the lines key=value of file $2 into the variables $1_key.
read_values() {
    local key value
    [ ! -f "$2" ] || while IFS='=' read -r key value; do
        case $key in '' | *[!a-z]*) ;; *) eval "$1_$key=\$value" ;; esac
    done <"$2"
}

# Read the record into r_*. All of them are empty if there is none, or its snapshot is gone.
read_record() {
    forget_values
    read_values r "$STATE/record"
    if [ -z "$r_snapshot" ] || [ ! -d "$STATE/bundles/$r_snapshot" ]; then forget_values; return 0; fi
    state_dirs "$r_snapshot" "$r_deltas"
    r_dirs=$reply
}
forget_values() {
    r_snapshot='' r_deltas=0 r_generation='' r_mode='' r_node='' r_flavour='' r_time=''
    r_ports=0 r_endpoints=0 r_unset='' r_kept='' r_dirs=''
}

# reply is the directories of the state that bundle $1 and its first $2 deltas make.
state_dirs() {
    local i
    i=1 reply=$STATE/bundles/$1
    while [ "$i" -le "$2" ]; do reply="$reply $STATE/bundles/$1/log/$i" i=$((i + 1)); done
}

# Move the incoming bundle to its place, before the kernel is touched. The record does not name it yet.
keep_bundle() {
    case $bundle in "$STATE"/in.* | "$work"/in) ;; *) return 0 ;; esac
    if [ "$b_kind" = Delta ]; then kept_now=$STATE/bundles/$r_snapshot/log/$((r_deltas + 1)); else kept_now=$STATE/bundles/$b_digest; fi
    if [ "$kept_now" = "$STATE/bundles/$r_snapshot" ]; then kept_now=''; return 0; fi
    # After a kill something may be there that no record names.
    [ ! -e "$kept_now" ] || rm -rf "$kept_now"
    { { [ -d "${kept_now%/*}" ] || mkdir -p "${kept_now%/*}"; } && mv "$bundle" "$kept_now" &&
        { [ "$b_kind" = Delta ] || mkdir "$kept_now/log"; }; } || {
        rm -rf "$kept_now"
        die 3 "the bundle cannot be kept in $STATE $FULL"
    }
    bundle=$kept_now
    [ "$b_kind" = Delta ] || dirs=$bundle
}

# True if this run goes to something new, not back.
forward() { case $verb in rollback | restore | undo) return 1 ;; esac; }

# Record bundle $1 with its first $2 deltas, which b_* describe. The states that rollback can reach are listed once each, the one that
# is replaced last but one; what a new log overwrites cannot be reached any more.
record_state() {
    local each list kept new old count
    new=$1/$2/$b_generation old=$r_snapshot/$r_deltas/$r_generation list='' kept=''
    if forward; then
        for each in $r_kept; do [ "$each" = "$old" ] || list="$list $each"; done
        [ -z "$r_snapshot" ] || list="$list $old"
        for each in $list; do
            count=${each#*/} count=${count%/*}
            case $each in */"$b_generation") continue ;; "$1"/*) [ "$count" -lt "$2" ] || continue ;; esac
            kept="$kept$each "
        done
    else kept="$r_kept "
    fi
    case " $kept" in *" $new "*) ;; *) kept="$kept$new " ;; esac
    write_record "$1" "$2" "$kept" "$new"
}

# Write the record, with the last $KEEP of the states $3; $4, which is in force, and the one that an undo would go back to always
# stay. Remove the bundles that it no longer names.
write_record() {
    local each skip kept
    count_words "$3"
    skip=$((reply - KEEP)) kept=''
    read_note
    for each in $3; do
        skip=$((skip - 1))
        if [ "$skip" -lt 0 ] || [ "$each" = "$4" ] || [ "${each##*/}" = "${u_previous:-none}" ]; then kept="$kept${kept:+ }$each"; fi
    done
    epoch
    reply="time=$reply${NL}ports=$b_ports${NL}endpoints=$b_endpoints${NL}unset=$unset_sysctls${NL}kept=$kept"
    reply="generation=$b_generation${NL}mode=$b_mode${NL}node=$b_node${NL}flavour=$flavour${NL}$reply"
    write_file "$STATE/record" "snapshot=$1${NL}deltas=$2${NL}$reply"
    read_record
    if [ -z "$unfinished" ] && [ -e "$STATE/unsettled" ]; then rm -f "$STATE/unsettled"; fi
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

# Remember, once for each mode, what cleanup has to put back. Written aside and renamed: it is whole or not there.
remember() {
    local file
    [ ! -e "$STATE/before/$b_mode" ] || return 0
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
