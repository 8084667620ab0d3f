# shellcheck shell=sh disable=SC2034,SC2154,SC3043
# ---------------------------------------------------------------- Main
usage() {
    cat <<'END'
akp-node - make this host's kernel equal to a bundle
  apply DIR     apply the bundle or delta in DIR, or on stdin if DIR is -
  check DIR     say what apply would do; change nothing
  status        compare the kernel with what was applied       facts     what this host is and can do
  rollback [G]  go back to the state before, or to a kept one  restore   apply the recorded state again, e.g. at boot
  confirm [T]   a change applied with --confirm-within stays   cleanup   remove everything apply made
  ask, show [G], release DIR, drain    for carriers, akp-pull and ipvs mode
Options
  --verify                  compare every rule, whatever the marker says
  --node NAME               refuse a bundle made for another node
  --confirm-within SECONDS  apply, rollback: undo the change unless confirm comes in time
  --max-removed PERCENT     apply, check: refuse if more of the service ports, or all endpoints, would go away
  --unsigned                check: look at a bundle that has no signature yet
  --dry-run                 rollback, cleanup, release: change nothing
  --known KEY               ask: without the facts if they still have this key
The last line on stdout is one JSON object. Exit: 0 ok, 2 bad bundle or usage, 3 missing tool or kernel feature, 4 the kernel refused, 5 locked.
END
}

# Read options and the operand from the arguments after the verb.
read_options() {
    while [ $# -gt 0 ]; do
        case $1 in --max-removed | --confirm-within | --known | --node) [ $# -gt 1 ] || die 2 "$1 needs a value" ;; esac
        case $1 in
            --verify) verify=1 ;;
            --unsigned) unsigned=1 ;;
            --dry-run) dry_run=1 ;;
            --max-removed) max_removed=$2; shift ;;
            --confirm-within) confirm_within=${2:-x}; shift ;;
            --known) known=$2; shift ;;
            --node) node_wanted=$2; shift ;;
            -h | --help) usage; exit 0 ;;
            -) operand=- ;;
            -*) die 2 "unknown option $1, see akp-node --help" ;;
            *) [ -z "$operand" ] || die 2 "one argument too many: $1"; operand=$1 ;;
        esac
        shift
    done
}

# End with 2 if the verb, an option or the environment makes no sense.
check_usage() {
    local each
    if [ -z "$KEEP" ]; then setting keep 3; KEEP=$reply; fi
    for each in "$LOCK_WAIT" "$KEEP" "$CHUNK" "$MAX_BUNDLE"; do
        is_number "$each" || die 2 "AKP_LOCK_WAIT, AKP_KEEP, AKP_CHUNK and AKP_MAX_BUNDLE are numbers, not \"$each\""
    done
    for each in "$STATE" "$RUN"; do
        case $each in *[!A-Za-z0-9/._@+-]* | [!/]*) die 2 "AKP_STATE and AKP_RUN are absolute paths with plain names, not \"$each\"" ;; esac
    done
    case $confirm_within in *[!0-9]* | 0* | ??????*) die 2 "--confirm-within takes a number of seconds, not \"$confirm_within\"" ;; esac
    case $max_removed in *[!0-9]* | ????* | 0?*) die 2 "--max-removed takes a number of percent, not \"$max_removed\"" ;; esac
    case $verb in apply | rollback | undo) ;; *) [ -z "$confirm_within" ] || die 2 "$verb takes no --confirm-within" ;; esac
    case $verb in
        apply | check | release) [ -n "$operand" ] || die 2 "$verb needs a directory" ;;
        rollback | confirm | undo | await | show) ;;
        status | facts | restore | cleanup | drain | ask) [ -z "$operand" ] || die 2 "$verb takes no argument" ;;
        *) die 2 "unknown verb \"$verb\", see akp-node --help" ;;
    esac
}

main() {
    local name
    clock
    started=$now verb=${1:-}
    case $verb in
        -h | --help | help) usage; exit 0 ;;
        --version) printf 'akp-node %s\n' "$VERSION"; exit 0 ;;
        '') usage >&2; die 2 "no verb given" ;;
    esac
    shift
    read_options "$@"
    check_usage
    # A file of root tells without a process; where it does not, as in a user namespace, id does.
    [ -O /proc/sys ] || [ "$(id -u)" = 0 ] || die 3 "$verb needs root"
    # Rules must come back after a reboot, and go when they should, whatever stands there.
    case $verb in apply | check | release) check_settings ;; esac
    for name in awk sed grep sha256sum cp mv rm mkdir cat cmp wc tr head; do has "$name" || die 3 "missing tool: $name"; done
    if [ -d "$STATE" ]; then
        own_directory "$STATE"
        # Deltas and questions do without the process that this takes: a whole bundle came before.
        case $verb in apply | ask) ;; *) closed_state ;; esac
    fi
    read_record
    case $verb in await) ;; *) make_work ;; esac
    # These ask the mode that is recorded.
    case $verb in status | ask | drain) [ "${r_mode:-$MODES}" = "$MODES" ] || run_elsewhere "$r_mode" ;; esac
    "verb_$verb" "$operand"
    answered=1
}

main "$@"
