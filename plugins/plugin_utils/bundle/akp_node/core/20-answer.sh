# shellcheck shell=sh disable=SC2034,SC2154,SC3043
# ---------------------------------------------------------------- Answer
say() { printf 'akp-node: %s\n' "$*" >&2; }

# awk: quote(text) is text as a JSON string; member is a member of an object.
quote_awk='
function quote(text) { gsub(/[^ -~]/, " ", text); gsub(/[\\"]/, "\\\\&", text); return "\"" text "\"" }
function member(name, value) { return value == "" ? "" : ", \"" name "\": " quote(value) }
'

# reply is a text as JSON, null for none.
json() {
    case $1 in
        '') reply=null ;;
        *[!A-Za-z0-9\ ._:/,\;=+@%\(\)-]*) reply="\"$(printf '%s' "$1" | tr -c ' -~' ' ' | sed 's/[\\"]/\\&/g')\"" ;;
        *) reply="\"$1\"" ;;
    esac
}

# Add members to the answer: names, each with its value, which is JSON, or a text.
put() { while [ $# -gt 0 ]; do members="$members, \"$1\": $2"; shift 2; done; }
put_text() { while [ $# -gt 0 ]; do json "$2"; put "$1" "$reply"; shift 2; done; }

# Print the lines of files, each of which is JSON, as one list.
list() { awk '{ printf "%s%s", comma, $0; comma = ", " }' "$@"; }

# Note a warning; it appears on stderr and in the answer.
warn() {
    say "warning: $*"
    json "$*"
    warnings="$warnings${warnings:+, }$reply"
}

# End with an exit code and its JSON. Never call it inside $( ).
die() {
    local code
    code=$1
    shift
    say "$*"
    json "$*"
    answered=1
    members=", \"code\": $code, \"asBefore\": $as_before, \"error\": $reply"
    printf '%s\n' "{\"verb\": \"${verb%%[!a-z]*}\", \"ok\": false$members, \"warnings\": [$warnings]}"
    exit "$code"
}

# Print the answer of a successful verb, in one write.
answer() {
    clock
    now=$((now - started))
    put seconds "$((now / 100)).$((now / 10 % 10))$((now % 10))"
    printf '%s\n' "{\"verb\": \"$verb\", \"ok\": true$members, \"warnings\": [$warnings]}"
    answered=1
}

# now is hundredths of a second since boot, which setting the clock does not change.
clock() {
    local up
    read -r up _ </proc/uptime
    now=$((${up%.*} * 100 + 1${up#*.} - 100))
}

# reply is seconds since the epoch, without a process: the kernel knows when it booted.
epoch() {
    local name value
    clock
    while read -r name value; do [ "$name" != btime ] || reply=$((value + now / 100)); done </proc/stat
}

# Make the private work directory, and one for a bundle. Whatever ends the process, it answers.
make_work() {
    local name
    trap 'leave "$?"' EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 141' PIPE
    trap 'exit 143' TERM
    own_directory "$RUN"
    read -r name </proc/sys/kernel/random/uuid
    work=$RUN/$$.$name bundle=$RUN/$$.$name/in
    # What may be recorded is taken on the disk of the record.
    [ "$verb" != apply ] || { own_directory "$STATE"; bundle=$STATE/in.$$; }
    mkdir "$work" "$bundle" 2>/dev/null || die 3 "$RUN or $STATE cannot be written (is it full?)"
}

# Make a directory that belongs to root, or end with 3: no other user decides what root does.
own_directory() {
    [ -d "$1" ] || mkdir -p "$1" 2>/dev/null || die 3 "the directory $1 cannot be made"
    if [ -L "$1" ] || [ ! -O "$1" ]; then die 3 "the directory $1 does not belong to root; remove it, or chown it to root"; fi
    [ -w "$1" ] || die 3 "the directory $1 cannot be written"
}

# End with 3 if another user may write to the state directory.
closed_state() {
    case $(ls -ldn "$STATE" 2>&1) in d????-??-?*) ;; *) die 3 "the directory $STATE can be written by others than root; see what is in it, and chmod go-w it" ;; esac
}

# The end of every run. One that stops in the middle says so; the next one completes what it had begun.
leave() {
    local code
    code=$1
    trap '' HUP INT TERM PIPE
    [ "$code" = 0 ] || confirm_failed
    set -- "$work"
    case $bundle in "$STATE"/in.*) set -- "$@" "$bundle" ;; esac
    [ -z "$synced" ] || set -- "$@" "$STATE/queued"
    [ -z "$work" ] || rm -rf "$@"
    [ -z "$answered" ] || exit "$code"
    case $code in 129 | 130 | 141 | 143) die "$code" "ended by a signal" ;; esac
    die 3 "ended in the middle, see the messages above $FULL"
}

has() { command -v "$1" >/dev/null 2>&1; }

# End with 3 if a tool is missing, naming the package that brings it.
need() { has "$1" || die 3 "missing tool: $1 (package $2)"; }

# True if the work directory has room. Some tools do not say that what they wrote was cut short.
room() { (printf '%65536s' '' >"$work/room") 2>/dev/null && : >"$work/room"; }

# Write the text $2 to the file $1: after a crash it is the old one or the new one.
write_file() { printf '%s\n' "$2" >"$1.new" && mv "$1.new" "$1"; }

# The same with the content of another file.
copy_file() { cp "$1" "$2.new" && mv "$2.new" "$2"; }

# refused is the first lines of a tool's messages in file $1, after the words $2.
first_lines() {
    refused=$(awk '{ sub(/^.*Error: /, "") } NF && !/^(Try | *\^)/ && n++ < 3 { text = text $0 " " } END { print substr(text, 1, 600) }' "$1" 2>/dev/null) || :
    refused="${2:+$2: }${refused:-no message}"
}

# Warn of what this run cannot put right: the next one looks at everything.
left_unfinished() {
    warn "$*"
    unfinished=1
    # Not ":", which would end the shell where nothing can be written.
    echo 2>/dev/null >"$STATE/unsettled" || :
}

# Run a command in a new, empty network namespace that ends with it.
in_sandbox() { has unshare && unshare -n "$@" >/dev/null 2>&1; }

# True in the host's own network namespace; false where that cannot be told.
# shellcheck disable=SC3013 # dash and busybox have it
initial_namespace() { [ /proc/self/ns/net -ef /proc/1/ns/net ]; }
