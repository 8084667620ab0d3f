# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- State directory
#   lock      held by the verbs that write
#   applied   key=value: what the last apply put into the kernel
#   seen      digest of that bundle and checksum of the kernel's text, for ask
#   ask       an answer to ask, good for as long as nothing changes
#   counter   of the last release that was applied, where releases are asked for
#   history   "digest generation" of the kept bundles, in the order they were first applied
#   pull/     what was pulled last, see Pull
#   bundles/  DIGEST/, the kept bundles
#   deltas/   1/, 2/, ...: the deltas applied since the recorded bundle
#   before/   what cleanup has to put back
#   unsettled a run was cut short, or could not finish: the next one looks at everything, and takes no delta
#   stale     nftables: chains that the kernel would not let go of yet

locked=
waited=0
# Take the lock, or end with 5. It is released when the process ends, however it ends.
lock() {
    [ -z "$locked" ] || return 0
    need flock util-linux
    while :; do
        [ -d "$STATE" ] || mkdir -p "$STATE/bundles" 2>/dev/null || die 3 "cannot make the state directory $STATE"
        [ -w "$STATE" ] || die 3 "cannot write in the state directory $STATE"
        # A cleanup that ended just now has removed the directory, or the file: then the lock is on nothing, even if somebody
        # has made another one since.
        { command exec 9>>"$STATE/lock"; } 2>/dev/null || { [ ! -d "$STATE" ] && continue; } || die 3 "cannot write in the state directory $STATE (is the disk full?)"
        # shellcheck disable=SC3013 # dash and busybox have it
        if flock -n 9 && [ "$STATE/lock" -ef /proc/self/fd/9 ]; then
            locked=1
            clear_after_killed
            read_record
            return 0
        fi
        [ "$waited" -lt "$LOCK_WAIT" ] || die 5 "locked: another run holds $STATE/lock, gave up after $LOCK_WAIT s"
        waited=$((waited + 1))
        sleep 1
    done
}

unlock() {
    exec 9>&-
    locked=
}

# The record of the last apply in variables, all of it at once: a process for each would be most of the time of a small
# change. Read when a run starts, again once it holds the lock, and whenever it wrote the record.
read_record() {
    r_generation='' r_digest='' r_deltas='' r_mode='' r_node='' r_flavour='' r_time='' r_unset_sysctls=''
    [ -f "$STATE/applied" ] || return 0
    while IFS='=' read -r key value; do
        case $key in
            generation) r_generation=$value ;;
            digest) r_digest=$value ;;
            deltas) r_deltas=$value ;;
            mode) r_mode=$value ;;
            node) r_node=$value ;;
            flavour) r_flavour=$value ;;
            time) r_time=$value ;;
            unset_sysctls) r_unset_sysctls=$value ;;
        esac
    done <"$STATE/applied"
}

# The value of a key in a file of key=value lines.
value_from() {
    [ -f "$1" ] || return 0
    while IFS='=' read -r key value; do
        if [ "$key" = "$2" ]; then
            printf '%s\n' "$value"
            return 0
        fi
    done <"$1"
}

settled=
# The directory of the recorded bundle, in $recorded; empty when there is none. Where there are deltas, settle comes first.
recorded_bundle() {
    recorded=$settled
    if [ -z "$recorded" ] && [ -n "$r_digest" ] && [ -d "$STATE/bundles/$r_digest" ]; then recorded=$STATE/bundles/$r_digest; fi
}

kept_now=
# Keep a copy of the bundle. Done before the kernel is touched, so that a full disk is found in time.
keep_bundle() {
    [ ! -d "$STATE/bundles/$digest" ] || return 0
    [ ! -e "$STATE/bundles/.new" ] || rm -rf "$STATE/bundles/.new"
    kept_now=$STATE/bundles/$digest
    { { [ -d "$STATE/bundles" ] || mkdir -p "$STATE/bundles"; } && cp -R "$bundle" "$STATE/bundles/.new" && mv "$STATE/bundles/.new" "$kept_now"; } || {
        rm -rf "$STATE/bundles/.new"
        undo_all
        die 3 "the bundle cannot be kept in $STATE (is the disk full?)"
    }
}

# Note the kept bundle as applied, and forget the oldest. Renames only: a crash leaves the old or the new record.
record() {
    replaced=$r_digest
    case $verb in
        rollback | restore | undo) in_history "$digest" || add_history "$digest" "$generation" ;;
        *)
            # What is replaced is what a rollback goes back to, also if that was older than others.
            if [ -n "$replaced" ] && [ "$replaced" != "$digest" ] && in_history "$replaced"; then add_history "$replaced" "$previous"; fi
            add_history "$digest" "$generation"
            ;;
    esac
    # After the history: a run that ends in between has listed a bundle more, and not recorded one that is not listed.
    write_applied "$digest" 0
    if [ -n "$unfinished" ]; then rm -rf "$STATE/deltas"
    elif [ -e "$STATE/unsettled" ] || [ -e "$STATE/deltas" ]; then rm -rf "$STATE/unsettled" "$STATE/deltas"
    fi
    prune_bundles "$digest"
}

# Is bundle $1 one of the kept ones? By the shell itself: a tool that fails would say no.
in_history() {
    [ -e "$STATE/history" ] || return 1
    while read -r d _; do [ "$d" != "$1" ] || return 0; done <"$STATE/history"
    return 1
}

# The generations that a rollback can go to and the applied one, quoted, the oldest first.
kept_generations() {
    [ -f "$STATE/history" ] || return 0
    set --
    while read -r _ kept; do set -- "$@" "$kept"; done <"$STATE/history"
    # No more of them than are told: each costs a process, and every push asks.
    i=$((${r_deltas:-0} - KEEP + 1))
    [ "$i" -gt 0 ] || i=1
    while [ "$i" -le "${r_deltas:-0}" ]; do
        set -- "$@" "$(value_in "$STATE/deltas/$i/manifest.json" generation)"
        i=$((i + 1))
    done
    comma=
    for kept; do
        [ $# -le "$KEEP" ] || { shift; continue; }
        printf '%s"%s"' "$comma" "$kept"
        comma=', '
    done
}

# What is applied: generation, made of bundle $1 and $2 deltas.
write_applied() {
    {
        printf 'generation=%s\ndigest=%s\ndeltas=%s\nmode=%s\nnode=%s\n' "$generation" "$1" "$2" "$mode" "$node"
        printf 'flavour=%s\ntime=%s\nunset_sysctls=%s\n' "$flavour" "$(date +%s)" "$unset_sysctls"
    } >"$STATE/applied.new"
    mv "$STATE/applied.new" "$STATE/applied"
    read_record
}

# Make bundle $1 of generation $2 the newest of the kept ones.
add_history() {
    {
        [ ! -e "$STATE/history" ] || while read -r d g; do
            [ "$d" = "$1" ] || [ "$g" = "$2" ] || printf '%s %s\n' "$d" "$g"
        done <"$STATE/history"
        printf '%s %s\n' "$1" "$2"
    } >"$STATE/history.new"
    mv "$STATE/history.new" "$STATE/history"
}

# Forget the oldest bundles; $1 is in use, and so is what an undo would go back to.
prune_bundles() {
    back=
    [ ! -e "$STATE/unconfirmed" ] || back=$(unconfirmed previous)
    known=0
    while read -r d g; do known=$((known + 1)); done <"$STATE/history"
    keep=" $1 "
    skip=$((known - KEEP))
    while read -r d g; do
        if [ "$skip" -gt 0 ] && [ "$d" != "$1" ] && [ "$g" != "$back" ]; then skip=$((skip - 1)); continue; fi
        skip=$((skip - 1))
        keep="$keep$d "
        printf '%s %s\n' "$d" "$g"
    done <"$STATE/history" >"$work/history"
    set --
    for d in "$STATE/bundles"/*; do
        case $keep in *" ${d##*/} "*) ;; *) set -- "$@" "$d" ;; esac
    done
    [ $# -eq 0 ] || rm -rf "$@"
    [ "$known" -le "$KEEP" ] || { cp "$work/history" "$STATE/history.new" && mv "$STATE/history.new" "$STATE/history"; }
}

made_before=
remembered=    # this run noted what there was before the mode
# Remember, once for each mode, what cleanup has to put back. Written aside and renamed: whole or not there,
# and a mode counts as remembered when the file of its name is there.
remember() {
    [ ! -e "$STATE/before/$mode" ] || return 0
    remembered=1
    [ ! -e "$STATE/before.new" ] || rm -rf "$STATE/before.new"
    mkdir -p "$STATE/before.new"
    "${mode}_remember" "$STATE/before.new"
    if [ -d "$STATE/before" ]; then
        for file in "$STATE/before.new"/*; do [ ! -e "$file" ] || mv "$file" "$STATE/before/"; done
        : >"$STATE/before/$mode"
        return 0
    fi
    : >"$STATE/before.new/$mode"
    : >"$STATE/before.new/sysctls"
    : >"$STATE/before.new/counters"
    known=$(! has nfacct || nfacct list 2>/dev/null) || :
    for name in $COUNTERS; do
        case $known in *" = $name;"*) printf '%s\n' "$name" >>"$STATE/before.new/counters" ;; esac
    done
    mv "$STATE/before.new" "$STATE/before"
    made_before=1
}

# ---------------------------------------------------------------- Sysctls, counters
unset_sysctls=     # names that could not be set in this namespace
changed_sysctls=0
made_counters=

# The file of a sysctl, in $path.
sysctl_path() {
    rest=$1 path=/proc/sys
    while :; do
        path=$path/${rest%%.*}
        case $rest in *.*) rest=${rest#*.} ;; *) break ;; esac
    done
}

# Is this the host's own network namespace? Where that cannot be told, no.
initial_namespace() {
    mine=$(readlink /proc/self/ns/net 2>/dev/null) && [ "$mine" = "$(readlink /proc/1/ns/net 2>/dev/null)" ]
}

# Print "name wanted actual" for each sysctl of the bundle that does not have its value,
# except the names in $1.
sysctls_differ() {
    [ -s "$bundle/sysctls.conf" ] || return 0
    awk -v except=" $1 " '
        /^#/ || NF < 3 || index(except, " " $1 " ") { next }
        {
            path = $1
            gsub(/\./, "/", path)
            path = "/proc/sys/" path
            if ((getline actual < path) < 1) actual = "absent"
            close(path)
            if (actual != $3) print $1, $3, actual
        }' "$bundle/sysctls.conf"
}

# Set what differs, noting each old value first: in before/ for cleanup, in the work directory for undo.
# What belongs to the initial namespace cannot be written from another: a warning.
sysctls_apply() {
    : >"$work/sysctls.undo"
    [ -e /proc/sys/net/netfilter/nf_conntrack_max ] || ! has modprobe || modprobe -q nf_conntrack 2>/dev/null || :
    sysctls_differ '' >"$work/sysctls"
    if [ -s "$work/sysctls" ]; then
        noted=' '
        while read -r name value; do noted="$noted$name "; done <"$STATE/before/sysctls"
        while read -r name value actual; do
            [ "$actual" != absent ] || continue
            case $noted in *" $name "*) ;; *) printf '%s %s\n' "$name" "$actual" >>"$STATE/before/sysctls" ;; esac
            printf '%s %s\n' "$name" "$actual" >>"$work/sysctls.undo"
            sysctl_path "$name"
            put_value "$path" "$value" || :
            changed_sysctls=$((changed_sysctls + 1))
        done <"$work/sysctls"
        sysctls_differ '' >"$work/sysctls"
    fi
    while read -r name value actual; do
        if initial_namespace; then
            refused="sysctl $name"
            printf '%s = %s; see what the configuration asks for\n' "$refused" "$value" >"$work/refused"
            undo_all
            [ "$actual" != absent ] || die 3 "missing kernel feature: $refused"
            die_refused
        fi
        warn "sysctl $name is $actual, not $value: it can only be set in the initial network namespace"
        unset_sysctls="$unset_sysctls${unset_sysctls:+ }$name"
        [ "$actual" = absent ] || changed_sysctls=$((changed_sysctls - 1))
    done <"$work/sysctls"
    hashsize_apply
}

# Write a kernel parameter; true when it was taken, or for write_value when it then reads back. Not by printf: what it
# could not write, some shells would say again later.
put_value() { echo "$2" 2>/dev/null >"$1"; }
write_value() { put_value "$1" "$2" && [ "$(cat "$1")" = "$2" ]; }

# The conntrack hash table follows nf_conntrack_max: at least a quarter of it. One per host.
HASHSIZE=/sys/module/nf_conntrack/parameters/hashsize
hashsize_apply() {
    [ -s "$bundle/sysctls.conf" ] && [ -e "$HASHSIZE" ] || return 0
    max=
    while read -r name _ value; do [ "$name" != net.netfilter.nf_conntrack_max ] || max=$value; done <"$bundle/sysctls.conf"
    [ -n "$max" ] && initial_namespace || return 0
    read -r old <"$HASHSIZE"
    [ "$old" -lt $((max / 4)) ] || return 0
    [ -e "$STATE/before/hashsize" ] || printf '%s\n' "$old" >"$STATE/before/hashsize"
    printf '%s\n' "$old" >"$work/hashsize"
    put_value "$HASHSIZE" $((max / 4)) || warn "conntrack hash size stays $old, wanted $((max / 4))"
}

# Put back the values in a file of "name value" lines.
sysctls_undo() {
    [ -f "$1" ] || return 0
    while read -r name value; do
        sysctl_path "$name"
        [ "$(cat "$path" 2>/dev/null)" = "$value" ] || write_value "$path" "$value" || left_unfinished "sysctl $name could not be set back to $value"
    done <"$1"
}

# Counters the bundle asks for, in $wanted.
counters_wanted() {
    wanted=
    [ -e "$bundle/nfacct.rules" ] || return 0
    while read -r name || [ -n "$name" ]; do case $name in '' | '#'*) ;; *) wanted="$wanted $name" ;; esac; done <"$bundle/nfacct.rules"
}

counter_exists() { nfacct get "$1" >/dev/null 2>&1; }

# Delete a counter. The kernel lets go of removed rules a moment after the transaction, so try for a while.
counter_delete() {
    for try in 1 2 3 4 5 6 7 8 9 10; do
        if nfacct delete "$1" >/dev/null 2>&1; then return 0; fi
        counter_exists "$1" || return 0
        [ "$try" = 10 ] || sleep 0.2 2>/dev/null || sleep 1
    done
    return 1
}

# Counters of the bundle that do not exist yet, in $missing.
counters_missing() {
    missing=
    counters_wanted
    for name in $wanted; do counter_exists "$name" || missing="$missing $name"; done
}

# Make them, before the rules that name them.
counters_apply() {
    counters_missing
    for name in $missing; do
        nfacct add "$name" >/dev/null 2>&1 || {
            undo_all
            die 3 "missing kernel feature: nfacct counters (module nfnetlink_acct), cannot make $name"
        }
        made_counters="$made_counters $name"
    done
}

# Something is not as it should be, and this run cannot help it: say so, and let the next one look at everything.
unfinished=
left_unfinished() {
    warn "$*"
    unfinished=1
    # Not by ":", which would end the shell where nothing can be written.
    echo 2>/dev/null >"$STATE/unsettled" || :
}

# End because of $work/refused. The old state is said to be back only if it is.
die_refused() {
    if grep -q 'xtables lock' "$work/refused"; then die 5 "locked: $(cat "$work/refused")"; fi
    [ "$as_before" = false ] || die 4 "the kernel refused, the old state is back: $(cat "$work/refused")"
    die 4 "the kernel refused, and not all of the old state could be put back (see the warnings), the next run will: $(cat "$work/refused")"
}

# Take back what this run changed beside the rules, which are back already or were not touched; the first failing run
# leaves no record either, unless something of it stays: that must not be taken for the host's own later.
undo_all() {
    sysctls_undo "$work/sysctls.undo"
    [ ! -s "$work/hashsize" ] || write_value "$HASHSIZE" "$(cat "$work/hashsize")" || left_unfinished "the conntrack hash size could not be set back"
    for name in $made_counters; do counter_delete "$name" || left_unfinished "counter $name could not be removed again"; done
    [ -z "$kept_now" ] || rm -rf "$kept_now"
    [ -z "$unfinished" ] || return 0
    [ -z "$switching" ] || rm -f "$STATE/unsettled"
    [ -z "$made_before" ] || rm -rf "$STATE/before"
    as_before=true
}

