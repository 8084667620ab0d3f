# shellcheck shell=sh disable=SC2015,SC2034,SC2086,SC2154,SC3043
# ---------------------------------------------------------------- Mode nftables
# Ours are the tables kube-proxy of the families ip and ip6. The marker is the empty chain gen-GENERATION in each.
# Work files: nft.listing is what the kernel lists; without it, the kernel is what the record says. nft.wanted, nft.actual and
# nft.listed are facts (nftables-replay.awk), nft/ a plan: transactions (nftables-write.awk).

nftables_shapes() { shapes=$nftables_shapes; }

# reply is the nft files of bundle directories, in the order in which they are loaded.
nft_files() {
    local dir file
    reply=''
    for dir; do
        for file in "$dir"/nftables-[1-4]-*.nft; do [ ! -e "$file" ] || reply="$reply $file"; done
    done
}

# reply is the families of the bundle in a directory. False if they cannot be told.
nft_families() {
    local found
    found=$(grep '^add table ' "$1/nftables-1-endpoints.nft") || return 1
    case $found in *' ip kube-proxy'*' ip6 '*) reply='ip ip6' ;; *' ip6 '*) reply=ip6 ;; *) reply=ip ;; esac
}

# Run nft; with -f FILE one transaction, all or nothing. False with refused: its message and the command it is about.
nft_load() { nft "$@" >/dev/null 2>"$work/err" || { first_lines "$work/err"; return 1; }; }

# True if the markers of generation $1 and the jumps are there in the families of the bundle in $2, and no table in another. nft
# pretends to delete markers, which works; chains that base chains jump to, which are busy; and a table that is not there.
nftables_look() {
    local f c text
    has nft && nft_families "$2" || return 1
    text=''
    for f in ip ip6; do
        case " $reply " in *" $f "*) ;; *) text="$text${NL}delete table $f kube-proxy"; continue ;; esac
        for c in "gen-$1" nodeport-endpoints-check service-endpoints-check firewall-check cluster-ips-check services masquerading; do
            text="$text${NL}delete chain $f kube-proxy $c"
        done
    done
    text=$(printf '%s\n' "$text" | nft -c -f - 2>&1) && return 1
    case $reply/$text in
        'ip ip6'/*'No such file'* | ip*/*'No such file'*'No such file'*) return 1 ;;
        'ip ip6'/*) f=12 ;;
        *'No such file'*) f=6 ;;
        *) return 1 ;;
    esac
    while [ "$f" -gt 0 ]; do
        case $text in *'esource busy'*) text=${text#*'esource busy'} f=$((f - 1)) ;; *) return 1 ;; esac
    done
}

# Print the markers that are in the kernel. False with refused if it cannot be read.
nftables_markers() {
    has nft || return 0
    nft list chains >"$work/nft.chains" 2>"$work/err" || { first_lines "$work/err"; return 1; }
    awk '$1 == "table" { f = $2 " " $3 } $1 == "chain" && f ~ /^ip6? kube-proxy$/ && sub(/^gen-/, "", $2) { print (f ~ /^ip6/ ? "ipv6" : "ipv4"), "kube-proxy", $2 }' "$work/nft.chains"
}

# End with 3 if nft or conntrack is missing, or nft too old.
nftables_preflight() {
    local version
    need nft nftables
    version=$(nft --version 2>/dev/null) || :
    version=${version#nftables v} version=${version%% *}
    case $version in 0.* | 1.0.0*) die 3 "missing tool: nft 1.0.1 or newer (package nftables), this is $version" ;; esac
    ! flows_pending || need conntrack conntrack
}

# ---------------------------------------------------------------- nftables: plan
# Write our tables, as the kernel lists them, into file $1. False if one is there that cannot be listed.
nft_list() {
    local f t
    : >"$1"
    nft list tables >"$work/nft.tables" 2>"$work/err" || return 1
    while read -r _ f t; do
        case $f/$t in ip/kube-proxy | ip6/kube-proxy) nft list table "$f" kube-proxy >>"$1" 2>"$work/err" || return 1 ;; esac
    done <"$work/nft.tables"
}

# Read the kernel, or learn by a look that it is what the record says; not after a run that was cut short, which may leave chains.
# Ends with 4 if it cannot be read: that is not the same as empty.
nftables_read() {
    rm -f "$work/nft.listing"
    if ! has nft; then : >"$work/nft.listing"
    elif [ -n "$verify" ] || [ "$r_mode" != nftables ] || [ -e "$STATE/unsettled" ] || ! nftables_look "$r_generation" $r_dirs; then
        nft_list "$work/nft.listing" && return 0
        first_lines "$work/err"
        die 4 "the kernel's tables cannot be read, nothing was changed: $refused"
    fi
}

# Write the facts that the files of directories lead to into file $1.
nft_replay() {
    local file
    file=$1
    shift
    nft_files "$@"
    { awk "$nftables_replay_awk" $reply >"$file" && [ -s "$file" ]; } || nft_unplanned
}

nft_unplanned() { die 3 "the plan could not be made (is $RUN full?)"; }

# Plan in directory $1 the way from the facts in $2 to those in $3: counts, details and transactions, with the text of $work/nft.wanted.
nft_transactions() {
    mkdir "$1/nft" "$1/plan.ip" "$1/plan.ip6" || nft_unplanned
    awk -v work="$1" -v out="$1/nft" -v CHUNK="$CHUNK" -v witness="taken-$$" "$quote_awk$nftables_diff_awk$nftables_write_awk" \
        pass=1 "$2" pass=2 "$3" pass=3 "$work/nft.wanted" && room || nft_unplanned
}

# Plan the change to what DIRS lead to.
nftables_plan() {
    local from to
    rm -rf "$work/nft" "$work"/plan.*
    nft_replay "$work/nft.wanted" "$@"
    from=$work/nft.actual to=$work/nft.wanted
    if [ ! -e "$work/nft.listing" ]; then nft_replay "$from" $r_dirs
    elif [ ! -s "$work/nft.listing" ]; then from=/dev/null
    else
        awk "$nftables_facts_awk" "$work/nft.listing" >"$from" || nft_unplanned
        nft_as_listed "$1"
        to=$work/nft.listed
    fi
    nft_transactions "$work" "$from" "$to"
}

# Write nft.listed: what is wanted, as this kernel and this nft list it, since a listing can only be compared with another one. $1 is
# the bundle. It is loaded into a network namespace of its own. Without one, attributes are taken for equal, and a rule that the
# listing writes differently is written again: good enough to make a change, not to name one.
nft_as_listed() {
    if ! in_sandbox true; then
        case $verb in status | ask) die 3 "missing tool: unshare (package util-linux), or the right to use it, which a comparison needs" ;; esac
        awk -F '\t' -v OFS='\t' '{ key = $1 FS $2 FS $3 }
            FNR == NR { if ($4 == "H") head[key] = $5; next }
            $4 == "H" && key in head && $3 !~ /^affinity-/ { $5 = head[key] }
            { print }' "$work/nft.actual" "$work/nft.wanted" >"$work/nft.listed" || nft_unplanned
        return 0
    fi
    { mkdir "$work/aside" && nft_families "$1"; } || nft_unplanned
    nft_transactions "$work/aside" /dev/null "$work/nft.wanted"
    # A family that cannot be listed would be one that is not wanted.
    # shellcheck disable=SC2016 # for the other shell
    unshare -n sh -c 'for f in "$0"/stage.* "$0"/switch; do [ ! -e "$f" ] || nft -f "$f" || exit 1; done
        for f; do nft list table "$f" kube-proxy || exit 1; done' "$work/aside/nft" $reply >"$work/aside/listing" 2>"$work/err" || {
        first_lines "$work/err"
        die 3 "the bundle could not be loaded into a network namespace of its own: $refused"
    }
    { awk "$nftables_facts_awk" "$work/aside/listing" >"$work/nft.listed" && [ -s "$work/nft.listed" ]; } || nft_unplanned
    rm -rf "$work/aside"
}

nftables_pending() { [ -s "$work/nft/switch" ]; }

# ---------------------------------------------------------------- nftables: commit
# Carry out the plan. If the kernel refuses, a plan from a listing may help.
nftables_commit() {
    local first
    nft_carry_out && return 0
    [ ! -e "$work/nft.listing" ] || return 1
    first=$refused
    if (verify=1 && nftables_read && nftables_plan $dirs) >/dev/null 2>&1 && nft_carry_out; then
        # The listing had what the first try could not remove.
        unfinished=''
        return 0
    fi
    refused=$first
    return 1
}

# Load the plan. False with refused: the kernel is as before, or left_unfinished says what is not.
nft_carry_out() {
    local found file fam chain status
    if [ -e "$STATE/unsettled" ]; then found=1; else found=''; fi
    : >"$STATE/unsettled"
    for file in "$work/nft"/stage.*; do
        [ ! -e "$file" ] || nft_load -f "$file" || { nft_unstage "$found"; return 1; }
    done
    trap '' HUP INT TERM
    # Both families switch in one transaction: all of it, or the kernel stays as it was.
    read -r fam chain <"$work/nft/witness"
    status=1
    if nft_load -c -f "$work/nft/switch"; then
        status=0
        nft_load -f "$work/nft/switch" || nft_taken "$fam" "$chain" || status=$?
    fi
    [ "$status" != 2 ] || left_unfinished "whether the kernel has the new rules could not be told"
    if [ "$status" = 0 ]; then nft_drop "$work/nft/drop"; else nft_unstage "$found"; fi
    return "$status"
}

# Has the kernel taken a transaction although nft failed, which can die on its way back? It made chain $2 in the table of family $1: 0
# yes, 1 no, 2 not to be told. nft pretends to delete the chain, which lists nothing.
nft_taken() {
    local first status
    first=$refused status=0
    nft_load -c delete chain "$1" kube-proxy "$2" || case $refused in *'No such file'*) status=1 ;; *) status=2 ;; esac
    refused=$first
    return "$status"
}

# Take back what was staged, and the mark, unless another run left it ($1).
nft_unstage() {
    local first
    first=$refused
    if [ -s "$work/nft/unstage" ] && ! nft_load -f "$work/nft/unstage"; then left_unfinished "what was staged could not be removed: $refused"; fi
    [ -n "$unfinished$1" ] || rm -f "$STATE/unsettled"
    refused=$first
}

# Delete the chains of file $1, if there is one, which nothing refers to any more; a kernel may not be ready at once, or a run that was
# cut short has done it. What stays is empty, and the next run tries again.
nft_drop() {
    local pause
    for pause in 1 2 0; do
        if [ ! -s "$1" ] || nft_load -f "$1"; then return 0; fi
        case $refused in *'No such file'*) return 0 ;; *) sleep "$pause" ;; esac
    done
    warn "chains that should go stay, empty, until the next run: $refused"
    stays=1
    : >"$STATE/unsettled"
}

# Load a delta: one transaction, so there is nothing to undo, then the drop of what it emptied. An nft that died after the kernel had
# taken the transaction is no refusal.
nftables_delta() {
    local drop
    drop=$1/nftables-4-drop.nft
    nft_files "$1"
    set -- ${reply%"$drop"}
    [ $# = 1 ] || { cat "$@" >"$work/delta" && set -- "$work/delta"; } || { refused="the delta cannot be read (is $RUN full?)"; return 1; }
    trap '' HUP INT TERM
    nft_load -f "$1" || { nft_families "${r_dirs%% *}" || :; nft_taken "${reply%% *}" "gen-$b_generation"; } || return "$?"
    nft_drop "$drop"
}

# Not needed here.
nftables_report() { :; }
nftables_settle() { :; }
nftables_before() { :; }
nftables_undo_before() { :; }

