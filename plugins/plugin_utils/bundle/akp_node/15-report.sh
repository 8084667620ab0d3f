# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Reporting
verb=
work=
warnings=
started=0
answered=    # the JSON line is out
called=      # what a verb that this one has called answered
as_before=true    # the kernel is as this run found it
outdated=    # marks in the state directory that no longer hold: they go with the work directory, in one process

usage() {
    cat <<'END'
akp-node - make this host's kernel equal to a bundle

  akp-node apply [--verify] [--node NAME] DIR    apply the bundle or delta in DIR, or on stdin if DIR is -
  akp-node check [--verify] [--node NAME] DIR    say what apply would do; change nothing
  akp-node status [--verify]                     compare the kernel with what was applied
  akp-node facts                                 what this host is and can do
  akp-node rollback [--verify] [GENERATION]      go back to the bundle before, or to a kept one
  akp-node confirm [TOKEN]                       a change applied with --confirm-within stays
  akp-node restore [--verify]                    apply the recorded bundle again, e.g. at boot
  akp-node cleanup                               remove everything apply made
  akp-node drain                                 ipvs: delete what was told to leave and has become idle
  akp-node pull [--jitter S] [--verify] [--dry-run]
                                                 fetch, verify and apply what was published for this node
  akp-node ask [--verify] [--known KEY]          status and facts in one, with as little work as will do
  akp-node health PORT[/ipv6]|healthz            answer one HTTP request on stdin, for systemd or inetd

Options
  --verify     apply, rollback, restore: compare every rule even if the generation is current;
               check, status: name every chain and rule that differs;
               pull: without news, too, compare every rule and put back what is missing
  --node NAME  refuse a bundle made for another node (or set AKP_NODE)
  --services   apply, check, rollback, cleanup: before the result, print each service port that
               changes as a line of JSON, after a - as it was and after a + as it will be
  --confirm-within SECONDS
               apply, rollback: undo the change by itself unless confirm comes in time
  --max-removed PERCENT
               apply, check, rollback: refuse if more of the service ports would go away
  --jitter S   pull: wait first, between 0 and S seconds, for each node its own time
  --unsigned   check: look at a bundle that nobody has signed yet
  --dry-run    rollback, cleanup, pull: say what would be done; change nothing
  --known KEY  ask: leave out the facts if this is still the key that they came with
  --help, --version

Environment
  AKP_STATE      state directory, default /var/lib/akp
  AKP_ETC        settings (node.conf) and allowed signers, default /etc/akp
  AKP_LOCK_WAIT  seconds to wait for another run, default 30
  AKP_KEEP       bundles kept for rollback, default 3, or keep in node.conf
  AKP_MAX_BUNDLE megabytes that a bundle on stdin may have unpacked, default 256
  AKP_IPTABLES   nft or legacy, where the host does not tell by itself
  AKP_ACCEPT_PORTS  ports a bundle may accept for health checks, default 1024-65535

The last line on stdout is one JSON object; everything else goes to stderr.
Exit: 0 ok, 2 bad bundle or usage, 3 missing tool or kernel feature, 4 the kernel refused,
5 locked; "asBefore" in the answer says whether the kernel is as it was before.
END
}

# Say something on stderr.
say() { printf 'akp-node: %s\n' "$*" >&2; }

# awk: quote(text) is text as a JSON string. Characters no message needs become blanks.
AWK_QUOTE='
function quote(text,   i, c, out) {
    for (i = 1; i <= length(text); i++) {
        c = substr(text, i, 1)
        if (c == "\"" || c == "\\") c = "\\" c
        else if (c < " " || c > "~") c = " "
        out = out c
    }
    return "\"" out "\""
}
'

# Print one JSON string.
json_string() {
    case $1 in
        *[!A-Za-z0-9\ ._:/,=+-]*) printf '%s\n' "$1" | tr '\n\t' '  ' | awk "$AWK_QUOTE"'{ sub(/ $/, ""); printf "%s", quote($0) }' ;;
        *) printf '"%s"' "$1" ;;
    esac
}

# Print a JSON string, or null for nothing.
json_or_null() { if [ -n "$1" ]; then json_string "$1"; else printf null; fi; }

# Note a warning; it appears on stderr and in the result.
warn() {
    say "warning: $*"
    warnings="$warnings${warnings:+, }$(json_string "$*")"
}

# End with an exit code and its JSON. Never call it inside $( ).
die() {
    code=$1
    shift
    say "$*"
    answered=1
    text=$(printf '{"verb": %s, "ok": false, "code": %s, "asBefore": %s, "error": %s, "warnings": [%s]}' \
        "$(json_string "$verb")" "$code" "$as_before" "$(json_string "$*")" "$warnings")
    printf '%s\n' "$text"
    [ "$verb" != pull ] || pull_end "$text"
    exit "$code"
}

# Hundredths of a second since boot, in $now: monotonic, and there without GNU date.
now() {
    read -r now _ </proc/uptime
    now=${now%.*}${now#*.}
    while :; do case $now in 0?*) now=${now#0} ;; *) break ;; esac; done
}
# Seconds since this run began, in $elapsed.
elapsed() {
    now
    spent=$(((now - started) % 100))
    case $spent in ?) spent=0$spent ;; esac
    elapsed=$(((now - started) / 100)).$spent
}

# A private work directory that goes away with the process. Whatever ends the process, it answers first.
# Its name is nobody's to guess, and mkdir takes nothing that is there: no need for mktemp and one more process.
make_work() {
    trap 'leave "$?"' EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    # Nobody reads the answer any more: what was begun is still brought to its end.
    trap 'exit 141' PIPE
    read -r name </proc/sys/kernel/random/uuid
    work=${TMPDIR:-/tmp}/akp-node.$name
    mkdir "$work" "$work/bundle" || die 3 "cannot make a temporary directory in ${TMPDIR:-/tmp}"
}

# What runs that were killed left there. No run takes an hour; if the clock was set this one seems to, and keeps its own.
clear_after_killed() {
    for name in "${TMPDIR:-/tmp}"/akp-node.*; do
        if [ "$name" = "$work" ] || [ ! -d "$name" ]; then continue; fi
        find "${TMPDIR:-/tmp}" -maxdepth 1 -name 'akp-node.*' ! -name "${work##*/}" -mmin +60 -exec rm -rf {} + 2>/dev/null || :
        return 0
    done
}

# The end of every run. One that stops in the middle says so: what it had begun, the next apply completes.
leave() {
    trap '' HUP INT TERM PIPE
    if [ -n "$new_arm" ] && [ -n "$answered" ] && [ "$1" != 0 ]; then confirm_failed; fi
    metrics_write "$1" || :
    code=$1
    set -- "$work"
    for name in $outdated; do
        # What this run could not finish is no older than the run.
        [ "$name$unfinished" = unsettled1 ] || set -- "$@" "$STATE/$name"
    done
    rm -rf "$@"
    [ -z "$answered" ] || exit "$code"
    # The reason why that one failed is the reason of this one.
    case $called in *'"ok": false, '*'}') printf '%s\n' "$called"; exit "$code" ;; esac
    case $code in
        129 | 130 | 141 | 143) die "$code" "ended by a signal" ;;
        *) die 3 "ended in the middle, see the messages above (is a disk full?)" ;;
    esac
}

# Is there room in the work directory? Some tools do not say that what they wrote was cut short.
room() {
    (printf '%65536s' '' >"$work/room") 2>/dev/null || return 1
    : >"$work/room"
}

has() { command -v "$1" >/dev/null 2>&1; }

# Is $0 this program, or the shell that was given it on stdin?
runs_from_file() { [ -f "$0" ] && grep -q '^# akp-node - ' "$0"; }

# Refuse (3) when a tool is missing, naming the package that brings it.
need() { has "$1" || die 3 "missing tool: $1 (package $2)"; }

