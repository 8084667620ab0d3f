# shellcheck shell=sh disable=SC2015,SC2034,SC2154,SC3043
# ---------------------------------------------------------------- Sysctls
HASHSIZE=/sys/module/nf_conntrack/parameters/hashsize    # at least a quarter of nf_conntrack_max; there is one per host

# Write "path wanted actual name" to $work/sysctls, for each sysctl of $dirs without its value; not for the names in $1.
sysctls_differ() {
    effective sysctls.conf
    : >"$work/sysctls"
    [ -z "$reply" ] || awk -v except=" $1 " '
        /^#/ || NF < 3 || index(except, " " $1 " ") { next }
        {
            path = $1
            gsub(/\./, "/", path)
            path = "/proc/sys/" path
            if ((getline actual < path) < 1) actual = "absent"
            close(path)
            if (actual != $3) print path, $3, actual, $1
        }' "$reply" >"$work/sysctls"
}

# Write a kernel parameter; true if it then reads back.
write_value() { echo "$2" 2>/dev/null >"$1" && [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }

# Note the old value of a parameter: in before/ for cleanup, in the work directory for undo. Ends with 3 if it cannot.
note_value() {
    { grep -q "^$1 " "$STATE/before/sysctls" || echo "$1 $2" >>"$STATE/before/sysctls"; } && echo "$1 $2" >>"$work/sysctls.undo" ||
        { undo_all; die 3 "$STATE cannot be written $FULL"; }
}

# Set the sysctls of $dirs that differ. What only the initial network namespace may write is a warning in another.
sysctls_apply() {
    local path value actual name
    unset_sysctls=''
    [ -e /proc/sys/net/netfilter/nf_conntrack_max ] || ! has modprobe || modprobe -q nf_conntrack 2>/dev/null || :
    sysctls_differ ''
    while read -r path value actual name; do
        if [ "$actual" != absent ] && note_value "$path" "$actual" && write_value "$path" "$value"; then changed_sysctls=$((changed_sysctls + 1))
        elif initial_namespace; then
            undo_all
            [ "$actual" != absent ] || die 3 "missing kernel feature: sysctl $name"
            refused="sysctl $name = $value; see what the configuration asks for"
            die_refused
        else
            warn "sysctl $name is $actual, not $value: it can only be set in the initial network namespace"
            unset_sysctls="$unset_sysctls${unset_sysctls:+ }$name"
        fi
    done <"$work/sysctls"
    if [ ! -e "$HASHSIZE" ] || ! initial_namespace; then return 0; fi
    effective sysctls.conf
    read -r actual <"$HASHSIZE"
    value=$(awk '$1 == "net.netfilter.nf_conntrack_max" { print int($3 / 4) }' "${reply:-/dev/null}")
    [ "$actual" -ge "${value:-0}" ] || { note_value "$HASHSIZE" "$actual" && write_value "$HASHSIZE" "$value"; } || warn "conntrack hash size stays $actual, wanted $value"
}

# Put back the values in file $1. Those that could not be set back are in $work/sysctls.left.
sysctls_undo() {
    local path value
    : >"$work/sysctls.left"
    [ ! -f "$1" ] || while read -r path value; do
        # Without its module there is no such sysctl, and nothing to set back.
        if [ ! -e "$path" ] || [ "$(cat "$path" 2>/dev/null)" = "$value" ]; then :
        elif write_value "$path" "$value"; then changed_sysctls=$((changed_sysctls + 1))
        else
            echo "$path $value" >>"$work/sysctls.left"
            left_unfinished "$path could not be set back to $value"
        fi
    done <"$1"
}

# Take back what this run changed beside the rules, which are as before. A first run that fails leaves no record, unless something of
# it stays: that must not be taken for the host's own later.
undo_all() {
    sysctls_undo "$work/sysctls.undo"
    "${b_mode}_undo_before"
    [ -z "$kept_now" ] || rm -rf "$kept_now"
    kept_now=''
    [ -z "$unfinished" ] || return 0
    [ -z "$switching" ] || rm -f "$STATE/unsettled"
    [ -z "$made_before" ] || rm -rf "$STATE/before"
    as_before=true
}

# End because of refused. The answer says that the old state is back only if it is.
die_refused() {
    case $refused in *'xtables lock'*) die 5 "locked: $refused" ;; esac
    [ "$as_before" = false ] || die 4 "the kernel refused, the old state is back: $refused"
    die 4 "the kernel refused, and not all of the old state could be put back (see the warnings), the next run will: $refused"
}
