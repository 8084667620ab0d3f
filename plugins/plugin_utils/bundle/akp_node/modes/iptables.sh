# shellcheck shell=sh disable=SC2015,SC2034,SC2086,SC2154,SC3043
# include tools/iptables.sh
# ---------------------------------------------------------------- Mode iptables
# Ours are kube-proxy's chains in nat, filter and mangle, and the jumps to them. A restore file is one transaction per table. The marker
# is the chain KUBE-PROXY-GEN-DIGITS in nat and filter, with the whole generation as the comment of its one rule.
# $work has what was read, in FLAVOUR.FAMILY, and a plan for each family, in plan.FAMILY (iptables-plan.awk).
seen=''             # what was read: words FLAVOUR.FAMILY.WHAT, where WHAT is nat, ours, kubelet or firewall
made_counters=''    # nfacct counters that this run made, or would make

iptables_shapes() { shapes=$iptables_shapes checks=$iptables_guard_awk; }
iptables_settle() { :; }

# reply is the rules files of family $1 in directory $2, in the order in which they are loaded; also those of ipvs mode.
iptables_files() {
    local file
    reply=''
    for file in "$2/ip${1#4}tables"-[1-3]-*.rules "$2/ip${1#4}tables.rules"; do [ ! -s "$file" ] || reply="$reply${reply:+ }$file"; done
}

# End with 3 unless this host has the tools that $dirs need.
iptables_preflight() {
    local fam
    need iptables iptables
    for fam in $FAMILIES; do
        iptables_files "$fam" "${dirs%% *}"
        [ -z "$reply" ] || for reply in save restore; do ipt "$fam" "$reply"; need "$reply" iptables; done
    done
    effective nfacct.rules
    [ ! -s "$reply" ] || need nfacct nfacct
    ! flows_pending || need conntrack conntrack
}

# True if the kernel holds the markers of generation $1 and the jumps of the bundle $2. Only their chains are listed, by restore input, or,
# where a version of iptables refuses that, all. It ends with 5 while another program holds the xtables lock.
iptables_look() {
    local fam marker files
    [ -n "$flavour" ] || return 1
    files='' marker=$(printf 'KUBE-PROXY-GEN-%013X' "0x${1%"${1#?????????????}"}")
    for fam in $FAMILIES; do
        iptables_files "$fam" "$2"
        [ -n "$reply" ] || continue
        # Jumps stand in the last file.
        files="$files have=1 $work/look.$fam have= ${reply##* }"
        # To ask for a legacy table that is not there would make it.
        iptables_tables "$fam"
        case $flavour/$reply in nft/* | *" nat "*" filter "* | *" filter "*" nat "*) ;; *) return 1 ;; esac
        printf '%s\n' '*nat' "-S $marker" '-S PREROUTING' '-S OUTPUT' '-S POSTROUTING' COMMIT \
            '*filter' "-S $marker" '-S INPUT' '-S FORWARD' '-S OUTPUT' COMMIT >"$work/look"
        if ! iptables_load "$fam" "$work/look" "$work/look.$fam"; then
            case $refused in *'xtables lock'*) die 5 "locked: $refused" ;; esac
            iptables_save "$fam" "$work/look.$fam" || return 1
        fi
        [ -s "$work/look.$fam" ] || return 1
    done
    awk -v gen="$1" -v marker="$marker" 'have { if (FNR == 1) { split("", there); marked = 0 } there[$0]; marked += $1 $2 == "-A" marker && index($0, gen); next }
        /^\*mangle/, /^COMMIT/ { next }
        FNR == 1 && marked != 2 || (sub(/^-I/, "-A") || /^-A (PREROUTING|OUTPUT) /) && !($0 in there) { exit wrong = 1 }
        END { exit wrong }' /dev/null $files
}

# Print the markers in the kernel. False with refused if it cannot be read.
iptables_markers() {
    local fam
    for fam in $FAMILIES; do
        iptables_save "$fam" "$work/marked" || return 1
        awk -v fam="ipv$fam" '/^\*/ { t = substr($1, 2) } /^-A KUBE-PROXY-GEN-/ { gsub(/"/, "", $NF); print fam, t, $NF }' "$work/marked" || return 1
    done
}

# Read both flavours and choose one. Ends with 4 if the kernel cannot be read, and with 3 if both flavours are in use; status and
# cleanup warn.
iptables_read() {
    iptables_read_all || die 4 "$refused"
    [ -n "$refused" ] || return 0
    case $verb in status | ask | cleanup) warn "$refused" ;; *) die 3 "$refused" ;; esac
}

# Read both, too: false with refused if the kernel cannot be read, true with refused if both flavours are in use.
iptables_read_all() {
    local fam
    for flavour in nft legacy; do
        for fam in $FAMILIES; do
            : >"$work/$flavour.$fam"
            ! iptables_has "$flavour" || iptables_save "$fam" "$work/$flavour.$fam" || return 1
        done
    done
    refused='what was read cannot be searched'
    seen=$(cd "$work" && awk "$iptables_owned_awk"'
        function see(what) { if (!found[FILENAME, what]++) printf " %s.%s ", FILENAME, what }
        /^\*/ { t = substr($1, 2); see(t) }
        /^:KUBE-/ {
            c = substr($1, 2)
            if (c ~ /^KUBE-(IPTABLES-HINT|KUBELET-CANARY)$/) see("kubelet")
            else if (c == "KUBE-FIREWALL") see("firewall")
            else if (is_owned(t, c)) see("ours")
        }' nft.4 nft.6 legacy.4 legacy.6) || return 1
    iptables_choose
}

# flavour is where kube chains live, else the recorded one, else that of the plain command. refused says why none is good.
iptables_choose() {
    local nft legacy
    flavour=$r_flavour nft='' legacy='' refused=''
    if [ -z "$flavour" ] || ! iptables_has "$flavour"; then iptables_plain; flavour=$reply; fi
    case $seen in *" nft."?".ours "*) nft=ours ;; *" nft."?".kubelet "*) nft=kubelet ;; esac
    case $seen in *" legacy."?".ours "*) legacy=ours ;; *" legacy."?".kubelet "*) legacy=kubelet ;; esac
    case $nft/$legacy in
        ours/ours) refused="KUBE chains live in iptables-nft and in iptables-legacy; stop what writes to one of them and clean it (kube-proxy --cleanup)" ;;
        / | kubelet/kubelet) ;;
        */) flavour=nft ;;
        /*) flavour=legacy ;;
        *) refused="kube-proxy's and kubelet's chains live in different flavours of iptables; set AKP_IPTABLES to the flavour kubelet uses" ;;
    esac
    [ -n "${AKP_IPTABLES:-}" ] || return 0
    flavour=$AKP_IPTABLES
    [ "$nft/$legacy" = ours/ours ] || refused=''
    case $flavour in nft | legacy) ;; *) die 2 "AKP_IPTABLES is \"$flavour\", not nft or legacy" ;; esac
}

# Plan how the kernel becomes the bundle $1 with the deltas after it.
iptables_plan() {
    local fam firewall
    for fam in $FAMILIES; do
        # Rules in KUBE-FIREWALL stay while kubelet is here, and if the chain was there before us.
        firewall=own
        case $seen in
            *" $flavour.$fam.kubelet "*) firewall=keep ;;
            *" $flavour.$fam.firewall "*) [ -e "$STATE/before/tables.$fam" ] && [ ! -s "$STATE/before/firewall.$fam" ] || firewall=keep ;;
        esac
        iptables_wanted "$fam" "$work/wanted" "$@" && iptables_compare "$work/$flavour.$fam" "$work/wanted" "$work/plan.$fam" "$firewall" ||
            die 3 "the comparison of ipv$fam rules failed $FULL"
    done
    for fam in $FAMILIES; do iptables_warn_kept "$work/plan.$fam/kept"; done
    effective nfacct.rules
    iptables_counters "$reply"
    [ "$verb" != check ] || made_counters=$reply
    for fam in $reply; do printf '{"kind": "missing-counter", "name": "%s"}\n' "$fam" >>"$work/plan.4/detail"; done
}

# Write to file $2 the text that the bundle $3 and the deltas after it lead to in family $1; nothing if it has no rules there.
iptables_wanted() {
    local fam out whole dir deltas
    fam=$1 out=$2 whole=$3 deltas=''
    shift 3
    for dir; do iptables_files "$fam" "$dir"; deltas="$deltas $reply"; done
    iptables_files "$fam" "$whole"
    : >"$out"
    # A whole 1-endpoints file has the table nat only, and is large.
    [ -z "$reply" ] || awk -v out="$out" "$iptables_replay_awk" $deltas whole=1 t=mangle ${reply#*-1-endpoints.rules} t=filter ${reply#*-1-endpoints.rules} t=nat $reply
}

# Plan in directory $3 how the iptables-save text $1 becomes the text $2 (iptables-plan.awk); $4 is "keep" if rules in KUBE-FIREWALL
# stay where none are wanted, else "own". False if there is no room.
iptables_compare() {
    local quick
    rm -rf "$3"
    mkdir "$3" && : >"$3/detail" && : >"$3/kept" && : >"$3/switch" || return 1
    # These answers name every difference.
    case $verb in check | status | ask) quick='' ;; *) quick=1 ;; esac
    awk -v out="$3" -v family="ipv${3##*.}" -v firewall="$4" -v quick="$quick" -v flavour="$flavour" -v chunk="$CHUNK" \
        "$quote_awk$iptables_owned_awk$iptables_have_awk$iptables_plan_awk" "$1" wanted=1 "$2" &&
        { [ ! -e "$3/names" ] || { sort "$3/names" && cat "$3/rest"; } >>"$3/switch"; } && room
}

# True if the plan has something to do.
iptables_pending() {
    local part
    [ -z "$made_counters" ] || return 0
    for part in "$work"/plan.[46]/switch "$work"/plan.[46]/stage; do [ ! -s "$part" ] || return 0; done
    return 1
}

# Carry out the plan: all staging, then the switch of each family. If a tool refuses, our chains and jumps of both families go back to
# what was read, and refused says why.
iptables_commit() {
    local fam part
    for part in stage switch; do
        [ "$part" = stage ] || trap '' HUP INT TERM
        for fam in $FAMILIES; do iptables_part "$fam" "$work/plan.$fam/$part" || { iptables_undo; return 1; }; done
    done
}

# Load a file of a plan, if it has lines. A version of iptables may refuse the listing in it (iptables-plan.awk); what neither inserts
# nor deletes rules can be loaded again.
iptables_part() {
    if [ ! -s "$2" ] || iptables_load "$1" "$2"; then return 0; fi
    grep -q '^-S$' "$2" && ! grep -q '^-[ID] ' "$2" && sed '/^-S$/d' "$2" >"$2.plain" && iptables_load "$1" "$2.plain"
}

# Put back what iptables_read read: the same comparison, with the old text as what is wanted. Tables that it made go too.
iptables_undo() {
    local fam why
    why=$refused
    trap '' HUP INT TERM
    for fam in $FAMILIES; do
        iptables_save "$fam" "$work/now" && iptables_compare "$work/now" "$work/$flavour.$fam" "$work/undo" own &&
            iptables_part "$fam" "$work/undo/stage" && iptables_part "$fam" "$work/undo/switch" ||
            left_unfinished "ipv$fam could not be put back: $refused"
        [ "$r_mode" = "$b_mode" ] || iptables_drop_tables "$fam"
    done
    refused=$why
}

# Load the delta in directory $1: 0 taken; 1 refused, and all is as recorded; 2 it may be in force in part. The kernel checks marker and
# jumps of its base, in the transaction.
iptables_delta() {
    local fam files load
    files='' load=''
    for fam in $FAMILIES; do
        iptables_files "$fam" "$1"
        case $reply in *' '*) files="$files out=$work/delta.$fam t=nat $reply t=filter $reply" reply=$work/delta.$fam ;; esac
        [ -z "$reply" ] || load="$load $fam $reply"
    done
    [ -z "$files" ] || { awk "$iptables_replay_awk" whole=1 $files && room; } || { refused="the delta cannot be put together $FULL"; return 1; }
    set -- $load
    trap '' HUP INT TERM
    while [ $# -gt 0 ]; do
        iptables_load "$1" "$2" || { iptables_refused; return "$?"; }
        shift 2
    done
}

# A delta was refused. If a table has its marker, or that cannot be told, all goes back to what is recorded: 1, or 2 if it cannot.
iptables_refused() {
    local why code
    why=$refused code=0
    iptables_markers >"$work/taken" && { grep -q " $b_generation\$" "$work/taken" || code=$?; }
    if [ "$code" != 1 ]; then
        { iptables_read_all && [ -z "$refused" ] && (iptables_plan $r_dirs) >/dev/null && iptables_commit; } && code=1 || code=2
    fi
    refused=$why
    return "$code"
}

iptables_report() {
    # shellcheck disable=SC2086 # split into words
    set -- $made_counters
    printf '"counters": %d, ' $#
}

# reply is the nfacct counters of file $1 that the kernel does not have.
iptables_counters() {
    local name
    reply=''
    [ -z "$1" ] || while read -r name; do
        case $name in '' | '#'*) ;; *) nfacct get "$name" >/dev/null 2>&1 || reply="$reply $name" ;; esac
    done <"$1"
}

# Make the counters that the rules name.
iptables_before() {
    local name
    reply=''
    if [ "$b_kind" = Bundle ] || [ "$verb" != apply ] || has_file nfacct.rules; then effective nfacct.rules; fi
    iptables_counters "$reply"
    for name in $reply; do
        if nfacct add "$name" >/dev/null 2>&1; then made_counters="$made_counters $name"; continue; fi
        undo_all
        die 3 "missing kernel feature: nfacct counters (module nfnetlink_acct), cannot make $name"
    done
}

iptables_undo_before() {
    local name
    for name in $made_counters; do drop_counter "$name"; done
}
