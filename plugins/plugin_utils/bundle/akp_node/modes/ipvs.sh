# shellcheck shell=sh disable=SC2015,SC2034,SC2046,SC2086,SC2183,SC2154,SC3043
# include tools/ipvs.sh
# ---------------------------------------------------------------- Mode ipvs
# Virtual servers, sets and the device kube-ipvs0; the rules that ask the sets are as in mode iptables. ipset, ipvsadm and ip have no
# transaction, so the order keeps Services alive: first what comes, then the rules, then what goes. A plan is a directory that
# ipvs-compare.awk writes.
IPVS_FILES='ipset-1-frontends.rules ipset-2-endpoints.rules ipvs-1-frontends.rules ipvs-2-endpoints.rules ip.batch'

ipvs_shapes() { shapes=$ipvs_shapes checks=$iptables_guard_awk; }
ipvs_markers() { iptables_markers; }
ipvs_before() { :; }
ipvs_undo_before() { :; }

# End with 3 if a tool or a module is missing. Modules are loaded here; check only asks whether they could be.
ipvs_preflight() {
    local name dry
    need ipvsadm ipvsadm
    need ipset ipset
    need ip iproute2
    iptables_preflight
    [ ! -e /sys/class/net/kube-ipvs0 ] || [ -n "$(ip -o link show dev kube-ipvs0 type dummy 2>/dev/null)" ] ||
        die 3 "kube-ipvs0 exists and is no dummy device; remove it (ip link del kube-ipvs0)"
    has modprobe || return 0
    ipvs_files 'ipvs-1-frontends.rules iptables.rules ip6tables.rules' $dirs
    reply=$(awk '
        $4 == "-s" && $2 ~ /^(-t|-u|--sctp-service)$/ { name["ip_vs_" $5] }
        / -m physdev / { name["xt_physdev"] }
        / -m ipvs / { name["xt_ipvs"] }
        END { for (i in name) print i }' $reply) || die 3 "the files of the bundle cannot be read"
    set -- ip_vs nf_conntrack dummy ip_set ip_set_hash_ip ip_set_hash_ipport ip_set_hash_ipportip ip_set_hash_ipportnet ip_set_bitmap_port xt_set xt_addrtype xt_comment xt_conntrack xt_mark $reply
    dry=''
    [ "$verb" != check ] || dry=-n
    for name; do
        shift
        [ -d "/sys/module/$name" ] || set -- "$@" "$name"
    done
    [ $# -eq 0 ] || modprobe -q $dry -a "$@" 2>/dev/null || for name; do
        modprobe -q $dry "$name" 2>/dev/null || die 3 "missing kernel feature: module $name, which ipvs mode needs (it comes with the kernel's packages)"
    done
}

# True if markers and jumps of generation $1, the device, all sets, and as many virtual servers as the directories after it lead
# to are there.
ipvs_look() {
    [ -e /sys/class/net/kube-ipvs0 ] && [ -e /proc/net/ip_vs ] && iptables_look "$@" && ipset list -n >"$work/names" 2>/dev/null || return 1
    shift
    ipvs_files 'ipset-1-frontends.rules ipvs-1-frontends.rules' "$@"
    awk 'pass == "names" { have[$1] = 1 }
         $1 == "create" && !($2 in have) { missing = 1; exit }
         $1 == "-A" { n++ }
         /^-D / || /^(TCP|UDP|SCTP) / { n-- }
         END { exit missing || n > 0 }' pass=names "$work/names" pass=files $reply /proc/net/ip_vs
}

# Read the kernel; end with 4 if it cannot be read.
ipvs_read() {
    iptables_read
    ipvs_save "$work/ipvs" || die 4 "$refused"
}

# ---------------------------------------------------------------- ipvs: plan
# Compare what ipvs_read read with what the directories lead to. End with 2 if they name a real server without its virtual server.
ipvs_plan() {
    iptables_plan "$@"
    ipvs_files "$IPVS_FILES" "$@"
    set -- $reply
    effective ipvs.conf
    ipvs_difference "$work/ipvs" "$work/plan.ipvs" "${reply:-/dev/null}" "$@" || die 3 "the comparison of sets and virtual servers failed (is $RUN full?)"
}

# Write into directory $2 what turns the kernel, read into directory $1, into what ipvs.conf $3 and the files after it lead to.
ipvs_difference() {
    local kernel out conf
    kernel=$1 out=$2 conf=$3
    shift 3
    rm -rf "$out"
    mkdir "$out" && : >"$out/detail" && awk "$ipvs_own_awk$ipvs_replay_awk" "$kernel/sets" "$kernel/servers" "$kernel/addresses" >"$out/have" || return 1
    awk "$ipvs_own_awk$ipvs_replay_awk" "$@" >"$out/want" 2>"$work/err" || { [ $? != 9 ] || { first_lines "$work/err"; die 2 "$refused"; }; return 1; }
    ipvs_ours "$kernel" "$out/want" "$conf" >"$out/servers.del" && awk -F '\t' -v out="$out" "$quote_awk$ipvs_compare_awk" pass=now "$kernel/timeouts" \
        pass=conf "$conf" pass=have "$out/have" pass=want "$out/want" pass=gone "$out/servers.del" && room
}

# True if the plan has something to do. A real server that was told to leave and is not idle yet is nothing to do.
ipvs_pending() {
    local part
    if iptables_pending; then return 0; fi
    for part in "$work"/plan.ipvs/*.* "$work/plan.ipvs/timeouts"; do [ ! -s "$part" ] || return 0; done
    [ -s "$work/plan.ipvs/leaving" ] && grep -q ' 0$' "$work/plan.ipvs/leaving"
}

# ---------------------------------------------------------------- ipvs: commit
# Carry out the plan. False with refused: then everything is as before, or left_unfinished says what is not.
ipvs_commit() {
    local plan drains
    plan=$work/plan.ipvs
    trap '' HUP INT TERM
    : >"$work/looked"
    if ipvs_come "$plan" && iptables_commit; then
        if ipvs_let_go "$plan" && drains=$reply && ipvs_go "$plan"; then
            ipvs_note "$drains"
            [ ! -e "$plan/sets.destroy" ] || ipvs_destroy "$plan/sets.destroy" || left_unfinished "sets that should go are still there: $refused"
            return 0
        fi
        ipvs_undo "$work/ipvs" iptables_undo
    else ipvs_undo "$work/ipvs" :
    fi
    return 1
}

# Add what the plan in directory $1 adds; remove what it removes. False with refused.
ipvs_come() { ipvs_tool "$1/sets.add" ipset restore -exist && ipvs_tool "$1/servers.add" ipvsadm -R && ipvs_tool "$1/addresses.add" ip -batch - && ipvs_timeouts "$1/timeouts"; }
ipvs_go() { ipvs_tool "$1/addresses.del" ip -force -batch - && ipvs_tool "$1/servers.del" ipvsadm -R && ipvs_tool "$1/sets.del" ipset restore -exist; }

# Set the timeouts in file $1, if there is one. Those before the first time are kept for cleanup.
ipvs_timeouts() {
    local old
    [ -s "$1" ] || return 0
    if [ ! -e "$STATE/before/timeouts" ]; then
        old=$(ipvsadm -L --timeout 2>"$work/err") && printf '%s\n' "${old##*: }" >"$STATE/before/timeouts" || { first_lines "$work/err" "ipvsadm -L --timeout"; return 1; }
    fi
    ipvsadm --set $(cat "$1") 2>"$work/err" || { first_lines "$work/err" "ipvsadm --set"; return 1; }
}

# Real servers that leave, $1/leaving, get no new TCP connections. The idle ones, and those of UDP and SCTP, are added to
# $1/servers.del, the others are in reply. They are told first and looked at then: a connection that came in between would be cut.
ipvs_let_go() {
    reply=''
    [ -s "$1/leaving" ] || return 0
    refused="the real servers that leave cannot be told apart (is $RUN full?)"
    awk '$1 == "-t" && $4 == 0 { print "-e " $1 " " $2 " -r " $3 " -m -w 0" }' "$1/leaving" >"$1/told" || return 1
    # A real server that is gone already cannot be told anything. Whether the others were told, the look says.
    [ ! -s "$1/told" ] || ipvsadm -R <"$1/told" >/dev/null 2>&1 || :
    ipvsadm -Ln >"$work/look" 2>"$work/err" || { first_lines "$work/err" "ipvsadm -Ln"; return 1; }
    reply=$(awk -v out="$1" "$ipvs_idle_awk"'END { printf "%s", idle >> (out "/servers.del") }' pass=leaving "$1/leaving" pass=look "$work/look") && room && return 0
    refused=${reply:-$refused}
    return 1
}

# Note the real servers that leave, lines "OPTION SERVER REAL 1".
ipvs_note() { [ -z "$1" ] && [ ! -s "$STATE/draining" ] || printf '%s' "${1:+$1$NL}" >"$STATE/draining" || left_unfinished "the real servers that leave could not be noted"; }

# Put sets, virtual servers, addresses and timeouts back to what ipvs_save read into directory $1. The rules go back in the
# middle, by the command after it: they need what comes, and may still use what goes. refused stays as it is.
ipvs_undo() {
    local why dir old ok
    why=$refused dir=$1 old='' ok=1
    shift
    # Before the module was loaded there were no timeouts to read.
    read -r old <"$dir/timeouts" || [ ! -s "$STATE/before/timeouts" ] || read -r old <"$STATE/before/timeouts"
    printf 'timeouts %s\n' "${old##*: }" >"$work/old.conf"
    ipvs_save "$work/ipvs.now" && ipvs_difference "$work/ipvs.now" "$work/ipvs.undo" "$work/old.conf" "$dir/sets" "$dir/servers" "$dir/addresses" && ipvs_come "$work/ipvs.undo" || ok=''
    "$@" || ok=''
    [ -n "$ok" ] && { [ ! -s "$work/ipvs.undo/leaving" ] || awk '{ print "-d", $1, $2, "-r", $3 }' "$work/ipvs.undo/leaving" >>"$work/ipvs.undo/servers.del"; } &&
        ipvs_go "$work/ipvs.undo" && { [ ! -e "$work/ipvs.undo/sets.destroy" ] || ipvs_destroy "$work/ipvs.undo/sets.destroy"; } ||
        left_unfinished "sets or virtual servers could not be put back: $refused"
    refused=$why
}

# ---------------------------------------------------------------- ipvs: delta
# Load the delta in directory $1. The rules go first: their transaction finds out whether the kernel has the base.
ipvs_delta() {
    local out code drains
    out=$work code=0
    ipvs_split "$1" "$out" || return 1
    drains=$reply
    trap '' HUP INT TERM
    : >"$work/looked"
    echo 2>/dev/null >"$STATE/unsettled" || { refused="$STATE cannot be written (is the disk full?)"; return 1; }
    iptables_delta "$1" || code=$?
    [ "$code" != 0 ] || { ipvs_come "$out" && ipvs_go "$out" && { ipvs_note "$drains"; return 0; }; } || ipvs_to_record || code=$?
    [ "$code" != 1 ] || [ -n "$unfinished" ] || rm -f "$STATE/unsettled"
    return "$code"
}

# Split the delta in directory $1 into the files of a plan in directory $2; reply is the real servers that leave from now on. End
# with 2 if it names a virtual server that no approved bundle has.
ipvs_split() {
    local out code
    out=$2 code=0
    ipvs_files "$IPVS_FILES ipvs.conf" "$1"
    set -- pass=delta $reply
    ipvs_files ipvs-1-frontends.rules $r_dirs
    set -- pass=known $reply "$@"
    if [ -s "$STATE/draining" ]; then
        ipvsadm -Ln >"$work/look" 2>"$work/err" || { first_lines "$work/err" "ipvsadm -Ln"; return 1; }
        set -- pass=leaving "$STATE/draining" pass=look "$work/look" "$@"
    fi
    reply=$(awk -v out="$out" "$ipvs_idle_awk$ipvs_delta_awk" "$@") && room && return 0 || code=$?
    refused=${reply:-the delta cannot be read (is $RUN full?)}
    [ "$code" != 9 ] || { undo_all; die 2 "$refused"; }
    return 1
}

# After a delta that failed in the middle: back to the record, by comparison. 1 if the kernel has that again, else 2; refused stays.
ipvs_to_record() {
    local why dirs
    why=$refused dirs=$r_dirs
    ipvs_read
    ipvs_plan $r_dirs
    ipvs_commit || left_unfinished "the recorded state could not be put back: $refused"
    refused=$why
    [ -z "$unfinished" ] || return 2
    return 1
}

# ---------------------------------------------------------------- ipvs: answers
# Print the plan beyond chains, for the answer.
ipvs_report() {
    [ ! -e "$work/plan.ipvs/numbers" ] || printf '"sets": {"added": %d, "changed": %d, "removed": %d, "entriesAdded": %d, "entriesRemoved": %d}, "servers": {"added": %d, "changed": %d, "removed": %d, "endpointsAdded": %d, "endpointsChanged": %d, "endpointsRemoved": %d}, "addresses": {"added": %d, "removed": %d}, ' $(cat "$work/plan.ipvs/numbers")
    reply=0
    [ ! -s "$STATE/draining" ] || while read -r _; do reply=$((reply + 1)); done <"$STATE/draining"
    printf '"draining": %d, ' "$reply"
}

# ---------------------------------------------------------------- ipvs: before and after
# Delete the real servers that were told to leave and have become idle: those that this run found, or that the last one noted.
ipvs_settle() {
    local from dir
    from=$work/plan.ipvs/leaving dir=$work/settle
    [ -e "$from" ] || from=$STATE/draining
    if [ -e "$work/looked" ] || [ ! -s "$from" ]; then return 0; fi
    mkdir "$dir"
    cp "$from" "$dir/leaving"
    as_before=false
    if ipvs_let_go "$dir" && from=$reply && ipvs_tool "$dir/servers.del" ipvsadm -R; then ipvs_note "$from"; return 0; fi
    warn "a real server that should go is still there, the next run will look again: $refused"
    sed 's/1$/0/' "$dir/leaving" >"$STATE/draining"
}
