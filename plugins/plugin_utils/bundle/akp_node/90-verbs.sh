# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Verbs

# The kernel becomes the bundle; a bundle that is there already changes nothing.
verb_apply() {
    open_bundle "$1"
    if [ "$kind" = Delta ]; then
        apply_delta
        return 0
    fi
    [ "$r_digest" = "$digest" ] || guard
    lock
    confirm_turn
    check_age
    automation_still_suffices
    settle store
    previous=$r_generation
    flavour=$r_flavour
    recorded_bundle
    compare_services "$recorded" "$bundle"
    if [ -z "$verify" ] && [ "$r_digest" = "$digest" ] && ! confirm_overdue && is_current; then
        [ "$mode" != ipvs ] || ipvs_drain
        note_release
        sync_ended
        health_sync
        print_change false
        return 0
    fi
    [ "$r_digest" = "$digest" ] || sync_begins
    "${mode}_read"
    "${mode}_preflight"
    "${mode}_compare"
    remember
    keep_bundle
    confirm_arm
    begin_switch
    as_before=false
    sysctls_apply
    counters_apply
    if "${mode}_pending"; then
        "${mode}_commit" || {
            undo_all
            die_refused
        }
        changed=true
    elif [ "$changed_sysctls" -gt 0 ] || [ -n "$made_counters" ] || [ "$r_generation" != "$generation" ]; then
        changed=true
    else
        changed=false
    fi
    trap '' HUP INT TERM
    [ "$mode" != ipvs ] || ipvs_drain
    leave_other_modes
    conntrack_apply delete
    if [ "$changed" = true ] || [ "$r_digest" != "$digest" ] || [ -e "$STATE/unsettled" ]; then record; fi
    note_release
    confirm_end "$changed"
    sync_ended
    health_sync
    print_change "$changed"
    # Only a shortcut for ask: without it, ask takes the long way.
    if can_glimpse && { [ "$changed" = true ] || ! grep -q "^$digest " "$STATE/seen" 2>/dev/null; }; then (note_seen) >/dev/null 2>&1 || :; fi
}

switching=    # this run changes the mode, and has said so
# A run that is cut short while it changes the mode leaves both in the kernel: whoever comes next, also to go back, must look.
begin_switch() {
    if [ -z "$r_mode" ] || [ "$r_mode" = "$mode" ] || [ -e "$STATE/unsettled" ]; then return 0; fi
    : >"$STATE/unsettled"
    switching=1
}

# Remove what other modes have in the kernel, ours or kube-proxy's, once the new rules are in: until then
# both serve. Looked for only when the mode is not the recorded one, or a run could not finish.
leave_other_modes() {
    [ "$r_mode" != "$mode" ] || [ -e "$STATE/unsettled" ] || return 0
    if [ "$mode" != nftables ]; then
        if nft_tables_exist; then
            nftables_remove || left_unfinished "the tables kube-proxy of nftables mode could not be removed: $(cat "$work/refused")"
            changed=true
        fi
        leave_ipvs
        return 0
    fi
    # The plan of the new mode is still wanted for the answer.
    whole=$work
    work=$work/leave
    mkdir "$work"
    for flavour in nft legacy; do
        flavour_present "$flavour" || continue
        for fam in $FAMILIES; do iptables_save "$fam" >"$work/actual.$fam"; done
        found=$(chains_of "$work/actual.4" "$work/actual.6") || found=ours
        case $found in
            *ours*) ;;
            # A run that was cut short may have come as far as this.
            *) iptables_drop_tables; continue ;;
        esac
        iptables_remove || left_unfinished "the chains of another mode could not be removed from iptables-$flavour: $(cat "$work/refused")"
        changed=true
    done
    flavour=
    work=$whole
    leave_ipvs
}

# The same for what ipvs mode has beside chains.
leave_ipvs() {
    if [ "$mode" = ipvs ] || ! ipvs_present; then return 0; fi
    ipvs_remove || left_unfinished "sets or virtual servers of ipvs mode could not be removed: $(cat "$work/refused")"
    changed=true
}

rules_current() { [ ! -e "$STATE/unsettled" ] && "${mode}_current"; }

# Everything that apply would set has its value, by a cheap look.
is_current() {
    rules_current && differing=$(sysctls_differ "$r_unset_sysctls") && [ -z "$differing" ] && counters_missing && [ -z "$missing" ]
}

# How many words $1 has, in $words.
count_words() {
    words=0
    for _ in $1; do words=$((words + 1)); done
}

# The result of apply and check; that of a run that could not finish is no success.
print_change() {
    [ -z "$unfinished" ] || die 4 "the new state is in force, but not all of the old one could be removed (see the warnings), the next run will try again"
    # At once: a run that ends in the middle of its answer has said nothing that can be read.
    text=$(change_text "$1")
    print_services
    printf '%s\n' "$text"
}

change_text() {
    printf '{"verb": "%s", "ok": true, "changed": %s, "node": "%s", "mode": "%s", ' "$verb" "$1" "$node" "$mode"
    # Not in a subshell each: a process is one too many.
    printf '"flavour": '
    json_or_null "$flavour"
    printf ', "generation": "%s", "previous": ' "$generation"
    json_or_null "$previous"
    printf ', '
    if [ -d "$work/plan.4" ]; then
        printf '"chains": {'
        "${mode}_counts"
        printf '}, '
    fi
    count_words "$made_counters"
    printf '"sysctls": %d, "counters": %d, "flows": %d, ' "$changed_sysctls" "$words" "$flows"
    if [ -e "$work/plan.ipvs/counts" ]; then ipvs_report; fi
    confirm_answer
    if [ -n "$verify" ] && [ "$verb" = check ]; then
        printf '"differences": ['
        "${mode}_details"
        printf '], '
    fi
    elapsed
    printf '"seconds": %s, "warnings": [%s]}\n' "$elapsed" "$warnings"
}

# What apply would do, from the same comparison; nothing is written, not even in the state directory.
verb_check() {
    open_bundle "$1"
    if [ "$kind" = Delta ]; then
        check_delta
        return 0
    fi
    guard
    settle
    previous=$r_generation
    recorded_bundle
    compare_services "$recorded" "$bundle"
    "${mode}_read"
    "${mode}_preflight"
    "${mode}_compare"
    sysctls_differ "$r_unset_sysctls" >"$work/sysctls"
    changed_sysctls=$(wc -l <"$work/sysctls")
    counters_missing
    made_counters=$missing
    conntrack_apply count
    if "${mode}_pending" || [ "$changed_sysctls" -gt 0 ] || [ -n "$made_counters" ] || [ "$r_generation" != "$generation" ]; then
        print_change true
    else
        print_change false
    fi
}

# Is what was applied still there?
#   applied  every marker is the recorded generation, and the jumps are there
#   absent   nothing recorded, nothing of ours in the kernel
#   flushed  recorded, but no marker in the kernel: flushed, or rebooted
#   partial  some markers or jumps are missing
#   foreign  the kernel has another generation, or chains of ours that nobody recorded
verb_status() {
    generation=$r_generation mode=$r_mode node=$r_node flavour=$r_flavour
    settle
    recorded_bundle
    bundle=$recorded
    drift=null
    : >"$work/markers"
    if [ -z "$bundle" ]; then
        state=absent
        iptables_read
        readable
        iptables_markers >"$work/markers"
        if chains_of "$work/actual.4" "$work/actual.6" | grep -q ours || nft_tables_exist || ipvs_present; then state=foreign; fi
        ! has nft || nftables_markers >>"$work/markers"
    else
        "${mode}_markers" >"$work/markers"
        "${mode}_expected" >"$work/expected"
        if [ ! -s "$work/markers" ]; then state=flushed
        elif grep -q -v " $generation\$" "$work/markers"; then state=foreign
        elif [ "$(wc -l <"$work/markers")" -lt "$(wc -l <"$work/expected")" ] || ! rules_current; then state=partial
        else state=applied
        fi
        if [ -n "$verify" ]; then
            "${mode}_read"
            readable
            [ -z "$flavour_trouble" ] || warn "$flavour_trouble"
            "${mode}_compare"
            sysctls_differ "$r_unset_sysctls" >"$work/sysctls"
            counters_missing
            for name in $missing; do printf '%s\n' "$name"; done >"$work/counters"
            # Not in a pipe, where a tool that fails would leave less to count.
            cat "$work"/plan.*/detail "$work/sysctls" "$work/counters" >"$work/drift"
            drift=$(wc -l <"$work/drift")
        fi
    fi
    text=$(status_text)
    printf '%s\n' "$text"
}

status_text() {
    printf '{"verb": "status", "ok": true, "state": "%s", "generation": %s, "kernel": [' "$state" "$(json_or_null "$generation")"
    awk '{ printf "%s{\"family\": \"%s\", \"table\": \"%s\", \"generation\": \"%s\"}", (NR > 1 ? ", " : ""), $1, $2, $3 }' "$work/markers"
    printf '], '
    printf '"mode": %s, "node": %s, "flavour": %s, ' "$(json_or_null "$mode")" "$(json_or_null "$node")" "$(json_or_null "$flavour")"
    printf '"appliedAt": %s, ' "${r_time:-null}"
    printf '"kept": [%s], ' "$(kept_generations)"
    confirm_status
    if [ "$drift" != null ]; then
        [ "$drift" -eq 0 ] || printf '"since": {"generation": "%s", "appliedAt": %d}, ' "$generation" "$r_time"
        {
            "${mode}_details"
            echo
            awk '{ printf "{\"kind\": \"sysctl\", \"name\": \"%s\", \"wanted\": \"%s\", \"actual\": \"%s\"}\n", $1, $2, $3 }' "$work/sysctls"
            awk '{ printf "{\"kind\": \"missing-counter\", \"name\": \"%s\"}\n", $1 }' "$work/counters"
        } >"$work/differences"
        printf '"drift": %d, "differences": [' "$drift"
        awk 'NF { printf "%s%s", (n++ ? ", " : ""), $0 }' "$work/differences"
        printf '], '
    fi
    elapsed
    printf '"seconds": %s, "warnings": [%s]}\n' "$elapsed" "$warnings"
}

# End if the kernel could not be read: what is not known to be there would be called missing.
readable() { [ -z "${unread:-}" ] || die 4 "$unread"; }

# What this host is and can do. Probes run in throw-away namespaces: nothing is left behind.
verb_facts() {
    if has iptables; then iptables_read; fi
    [ -z "$flavour_trouble" ] || warn "$flavour_trouble"
    text=$(facts_text)
    printf '%s\n' "$text"
}

facts_text() {
    printf '{"verb": "facts", "ok": true, "hostname": %s, "kernel": %s, ' "$(json_string "$(uname -n)")" "$(json_string "$(uname -r)")"
    printf '"cpus": %d, "addresses": [%s], ' "$(online_cpus)" "$(interface_addresses)"
    printf '"capabilities": {"ipv4": %s, "ipv6": %s, ' "$(truth family_usable 4)" "$(truth family_usable 6)"
    printf '"nfacct": %s, "iptables": %s, ' "$(truth nfacct_works)" "$(iptables_fact)"
    printf '"nft": %s, "ipset": %s, ' "$(nft_fact)" "$(ipset_fact)"
    printf '"ipvs": %s}, ' "$(truth ipvs_works)"
    be_liberal=$(cat /proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal 2>/dev/null || echo 0)
    printf '"tcpBeLiberal": %d, "tools": {' "$be_liberal"
    comma=
    for name in iptables ip6tables iptables-nft iptables-legacy nft ipset ipvsadm conntrack nfacct ip flock sha256sum unshare curl wget ssh-keygen; do
        printf '%s"%s": %s' "$comma" "$name" "$(truth has "$name")"
        comma=', '
    done
    elapsed
    printf '}, "akpNode": "%s", "seconds": %s, "warnings": [%s]}\n' "$VERSION" "$elapsed" "$warnings"
}

truth() { if "$@" >/dev/null 2>&1; then echo true; else echo false; fi; }

# Processors online, from ranges like 0-3,8.
online_cpus() {
    awk -F , '{ for (i = 1; i <= NF; i++) { n = split($i, r, "-"); total += n > 1 ? r[2] - r[1] + 1 : 1 } print total }' \
        /sys/devices/system/cpu/online 2>/dev/null || grep -c '^processor' /proc/cpuinfo
}

# Every address of every interface, loopback included.
interface_addresses() {
    if has ip; then
        ip -o addr show 2>/dev/null | awk "$AWK_QUOTE"'
            $3 == "inet" || $3 == "inet6" {
                split($4, a, "/")
                printf "%s{\"interface\": %s, \"address\": %s, \"prefix\": %d}", (n++ ? ", " : ""), quote($2), quote(a[1]), a[2]
            }'
    fi
}

# A counter can be made and a rule that names it loads.
nfacct_works() {
    ipt 4
    has nfacct && in_sandbox sh -c 'nfacct add akp_probe && "$1" -N AKP-PROBE &&
        "$1" -A AKP-PROBE -m nfacct --nfacct-name akp_probe' sh "$ipt"
}

ipvs_works() { [ -e /proc/net/ip_vs ] || { has modprobe && modprobe -n -q ip_vs; }; }

iptables_fact() {
    if [ -z "$flavour" ]; then printf null; return 0; fi
    ipt 4
    version=$("$ipt" -V 2>/dev/null | sed -n 's/^[^ ]* v\([0-9.]*\).*/\1/p')
    printf '{"flavour": "%s", "version": %s}' "$flavour" "$(json_or_null "$version")"
}

nft_fact() {
    version=
    if has nft && in_sandbox nft add table ip akp-probe; then version=$(nft --version | sed -n 's/^nftables v\([0-9.]*\).*/\1/p'); fi
    json_or_null "$version"
}

ipset_fact() {
    version=
    if has ipset && in_sandbox ipset create AKP-PROBE hash:ip; then version=$(ipset --version | sed -n 's/^ipset v\([0-9.]*\).*/\1/p'); fi
    json_or_null "$version"
}

# Apply a kept bundle: the one before the recorded one, or the one whose generation starts with $1.
verb_rollback() {
    trusted=1
    [ -s "$STATE/history" ] || die 2 "no bundle was applied here, there is nothing to go back to"
    case $1 in *[!0-9a-f]*) die 2 "\"$1\" is not a generation" ;; esac
    if [ -z "$1" ] && [ -f "$STATE/unconfirmed" ] && [ -z "$dry_run" ]; then
        [ -n "$(unconfirmed previous)" ] || die 2 "no bundle was there before the one that waits for its confirmation; cleanup removes it"
        verify=1
        go_back_to "$(unconfirmed previous)"
        return 0
    fi
    # What deltas led to is kept in parts.
    if [ -n "$dry_run" ]; then settle; else lock && settle store; fi
    if [ -n "$settled" ]; then
        case $(value_in "$work/previous/manifest.json" generation) in "$1"*) verb_check "$work/previous"; return 0 ;; esac
    fi
    if [ -n "$1" ]; then
        found=$(sed -n "s/^\([0-9a-f]*\) $1[0-9a-f]*\$/\1/p" "$STATE/history")
        [ -n "$found" ] || die 2 "generation $1 is not kept here; those that are: $(kept_generations)"
        [ "$(printf '%s\n' "$found" | wc -l)" -eq 1 ] || die 2 "generation $1 is not unique, give more digits"
    else
        found=$(awk -v d="$r_digest" '$1 == d { print last; exit } { last = $1 }' "$STATE/history")
        [ -n "$found" ] || die 2 "no bundle before the recorded one is kept"
    fi
    if [ -n "$dry_run" ]; then verb_check "$STATE/bundles/$found"; else verb_apply "$STATE/bundles/$found"; fi
}

# Apply the recorded bundle again, with no help from outside.
verb_restore() {
    trusted=1
    if confirm_overdue; then
        lock
        # While this run waited another one may have undone it, or somebody confirmed it.
        if confirm_overdue; then
            confirm_undo
            return 0
        fi
    fi
    settle
    recorded_bundle
    [ -n "$recorded" ] || die 2 "no bundle was applied here, there is nothing to restore"
    verb_apply "$recorded"
}

# The host is as it was before the first apply; foreign rules are not touched.
verb_cleanup() {
    [ -n "$dry_run" ] || lock
    settle
    recorded_bundle
    bundle=$recorded
    compare_services "$bundle" ''
    iptables_read
    # What was applied says where to look, even on a host that now has chains in both flavours.
    wanted=$r_flavour
    ! foreign_noted flavour || wanted=$(cat "$STATE/foreign/flavour")
    if [ -n "$wanted" ] && [ "$wanted" != "$flavour" ]; then
        flavour=$wanted
        for fam in $FAMILIES; do iptables_save "$fam" >"$work/actual.$fam"; done
    elif [ -n "$flavour_trouble" ]; then die 3 "$flavour_trouble"
    fi
    if [ -n "$dry_run" ]; then
        changed=false
        if [ -d "$STATE/before" ] || chains_of "$work/actual.4" "$work/actual.6" | grep -q ours || nft_tables_exist || ipvs_present; then changed=true; fi
        print_services
        elapsed
        printf '{"verb": "cleanup", "ok": true, "changed": %s, "flavour": %s, "seconds": %s, "warnings": [%s]}\n' \
            "$changed" "$(json_or_null "$flavour")" "$elapsed" "$warnings"
        return 0
    fi
    as_before=false
    ! foreign_noted ipvs/sets || ipvs_remove || die 4 "what was there before ipvs mode could not be put back, run it again"
    iptables_remove || {
        # Its own it has put back, and there is no more unless an undo came first to what ipvs mode had.
        [ -n "$unfinished" ] || foreign_noted ipvs/sets || as_before=true
        die_refused
    }
    changed=false
    if iptables_pending || [ -d "$STATE/before" ]; then changed=true; fi
    if foreign_noted nft || nft_tables_exist || [ -n "$(! has nft || nftables_markers)" ]; then
        nftables_remove || die 4 "the tables kube-proxy of nftables mode could not be removed: $(cat "$work/refused")"
        changed=true
    fi
    if ipvs_present && ! foreign_noted ipvs/sets; then
        ipvs_remove || die 4 "what ipvs mode has could not be removed: $(cat "$work/refused")"
        changed=true
    fi
    if [ -d "$STATE/before" ]; then
        cleanup_sysctls
        for name in $COUNTERS; do
            if has nfacct && counter_exists "$name" && ! grep -q -x "$name" "$STATE/before/counters"; then
                if counter_delete "$name"; then made_counters="$made_counters $name"
                else
                    # A rule of somebody else may count with it: that is no failure.
                    case $(nfacct delete "$name" 2>&1) in
                        *busy*) warn "counter $name is in use and stays" ;;
                        *) left_unfinished "counter $name could not be removed" ;;
                    esac
                fi
            fi
        done
    fi
    [ -n "$undoing" ] || confirm_disarm
    # What could not be set back is for the next cleanup, which needs to know it.
    if [ -n "$unfinished" ] && [ -d "$STATE/before" ]; then
        cp "$work/sysctls.left" "$STATE/before/sysctls.new"
        mv "$STATE/before/sysctls.new" "$STATE/before/sysctls"
    else rm -rf "$STATE/before" "$STATE/unsettled"
    fi
    rm -rf "$STATE/bundles" "$STATE/deltas" "$STATE/applied" "$STATE/applied.new" "$STATE/history" "$STATE/history.new" "$STATE/before.new" "$STATE/seen" "$STATE/seen.new" "$STATE/ask" "$STATE/ask.new" "$STATE/stale" "$STATE/draining" "$STATE/undone" "$STATE/confirmed" "$STATE/pull" "$STATE/queued"
    read_record
    health_leave
    # Where releases are asked for, an old one must not count again.
    if ! signed_only; then rm -f "$STATE/counter" "$STATE/counter.new"; fi
    [ -z "$unfinished" ] || die 4 "what was applied is removed, but not all of the rest could be set back (see the warnings), the next cleanup will try again"
    # Last, as others may begin then. An undo is not at its end: it has yet to say so.
    if [ -z "$undoing" ]; then
        rm -f "$STATE/lock"
        rmdir "$STATE" 2>/dev/null || :
    fi
    print_services
    printf '{"verb": "cleanup", "ok": true, "changed": %s, "flavour": %s, "chains": {%s}, ' "$changed" "$(json_or_null "$flavour")" "$(iptables_counts)"
    count_words "$made_counters"
    elapsed
    printf '"sysctls": %d, "counters": %d, "seconds": %s, "warnings": [%s]}\n' \
        "$changed_sysctls" "$words" "$elapsed" "$warnings"
}

# Look again at the real servers that were told to leave while they had connections.
verb_drain() {
    lock
    mode=$r_mode
    [ "$mode" != ipvs ] || ipvs_drain
    ipvs_draining
    elapsed
    printf '{"verb": "drain", "ok": true, "draining": %d, "seconds": %s, "warnings": [%s]}\n' "$draining" "$elapsed" "$warnings"
}

# Put sysctls back, except one that somebody changed since we set it. Those that could not be are in $work/sysctls.left.
cleanup_sysctls() {
    : >"$work/sysctls"
    : >"$work/sysctls.left"
    [ -z "$bundle" ] || sysctls_differ '' >"$work/sysctls"
    while read -r name value; do
        if grep -q "^$name " "$work/sysctls"; then
            warn "sysctl $name was changed by somebody else and stays"
            continue
        fi
        sysctl_path "$name"
        # Without its module there is none, and nothing to set back.
        if [ ! -e "$path" ] || [ "$(cat "$path" 2>/dev/null)" = "$value" ]; then continue; fi
        if write_value "$path" "$value"; then changed_sysctls=$((changed_sysctls + 1))
        else
            printf '%s %s\n' "$name" "$value" >>"$work/sysctls.left"
            left_unfinished "sysctl $name could not be set back to $value"
        fi
    done <"$STATE/before/sysctls"
    if [ -s "$STATE/before/hashsize" ] && [ -e "$HASHSIZE" ]; then
        write_value "$HASHSIZE" "$(cat "$STATE/before/hashsize")" || left_unfinished "the conntrack hash size could not be set back"
    fi
}

main() {
    now
    started=$now
    verb=${1:-}
    case $verb in
        -h | --help | help) usage; exit 0 ;;
        --version) printf 'akp-node %s\n' "$VERSION"; exit 0 ;;
        '') usage >&2; die 2 "no verb given" ;;
    esac
    shift
    verify='' operand='' previous='' want_node=${AKP_NODE:-}
    while [ $# -gt 0 ]; do
        case $1 in
            --verify) verify=1 ;;
            --services) services=1 ;;
            --unsigned) unsigned=1 ;;
            --dry-run) dry_run=1 ;;
            --max-removed) [ $# -gt 1 ] || die 2 "--max-removed needs a number"; max_removed=$2; shift ;;
            --confirm-within) confirm_within=${2:-x}; [ $# -lt 2 ] || shift ;;
            --jitter) [ $# -gt 1 ] || die 2 "--jitter needs a number of seconds"; jitter=$2; shift ;;
            --known) [ $# -gt 1 ] || die 2 "--known needs a key"; known=$2; shift ;;
            -) operand=- ;;
            --node) [ $# -gt 1 ] || die 2 "--node needs a name"; want_node=$2; shift ;;
            -h | --help) usage; exit 0 ;;
            -*) die 2 "unknown option $1, see akp-node --help" ;;
            *) [ -z "$operand" ] || die 2 "one argument too many: $1"; operand=$1 ;;
        esac
        shift
    done
    if [ -z "${AKP_KEEP:-}" ] && has_settings; then KEEP=$(setting keep 3); fi
    for number in "$LOCK_WAIT" "$KEEP" "$CHUNK"; do
        case $number in '' | *[!0-9]*) die 2 "AKP_LOCK_WAIT, AKP_KEEP and AKP_CHUNK are numbers, not \"$number\"" ;; esac
    done
    case $confirm_within in *[!0-9]* | 0* | ??????*) die 2 "--confirm-within takes a number of seconds up to 99999, not \"$confirm_within\"" ;; esac
    case $jitter in '' | *[!0-9]* | ??????*) die 2 "--jitter takes a number of seconds up to 99999, not \"$jitter\"" ;; esac
    case $verb in apply | rollback) ;; *) [ -z "$confirm_within" ] || die 2 "$verb takes no --confirm-within" ;; esac
    case $max_removed in *[!0-9]*) die 2 "--max-removed takes a number of percent, not \"$max_removed\"" ;; esac
    case $verb in
        apply | check) [ -n "$operand" ] || die 2 "$verb needs a bundle directory" ;;
        health) [ -n "$operand" ] || die 2 "health needs a port" ;;
        rollback | confirm | undo | await) ;;
        status | facts | restore | cleanup | drain | ask | pull) [ -z "$operand" ] || die 2 "$verb takes no argument" ;;
        *) die 2 "unknown verb \"$verb\", see akp-node --help" ;;
    esac
    # What root owns tells without a process; where it does not, as in a user namespace, id does.
    [ -O /proc/sys ] || [ "$(id -u)" = 0 ] || die 3 "$verb needs root"
    # Rules must come back after a reboot, and go when they shall, whatever somebody wrote there.
    case $verb in apply | check | pull) check_settings ;; esac
    # Without one of these a question would be answered wrongly somewhere.
    for name in awk sed grep sha256sum cp mv rm mkdir cat cmp wc tr cut head date; do has "$name" || die 3 "missing tool: $name"; done
    read_record
    case $verb in ask | await | health) ;; *) make_work ;; esac
    "verb_$verb" "$operand"
    answered=1
}

main "$@"
