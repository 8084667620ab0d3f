# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Deltas
# A delta holds what turns one generation, its base, into the next: the commands for changed rules, and for files
# of one line per Service (NAME.diff) the lines that go, after a -, and those that come, after a +. It is taken
# only while the kernel has its base. Applied deltas are kept as they came, in deltas/, beside the bundle they
# build on; whatever needs the whole bundle has it made by settle. Of a mode they ask
#   MODE_on_base   the kernel has generation $base in every family of the delta
#   MODE_delta     load it; on failure all is as before and $work/refused says why
#   MODE_merge     DIR BASE DELTA...: the mode's files of BASE and all DELTAs, in DIR
DELTAS=50      # deltas kept beside a bundle before they are made one

apply_delta() {
    if delta_applied; then
        if [ -n "$counter" ]; then lock && check_age && note_release; fi
        print_change false
        return 0
    fi
    delta_obstacle
    if [ -n "$why" ]; then
        answer_full "$why"
        return 0
    fi
    guard_delta
    delta_services
    lock
    confirm_turn
    check_age
    # While this run waited for the lock the other one may have changed everything.
    delta_obstacle
    if [ -z "$why" ] && ! "${mode}_on_base"; then why="the kernel does not have generation $base"; fi
    if [ -n "$why" ]; then
        answer_full "$why"
        return 0
    fi
    previous=$r_generation
    flavour=$r_flavour
    sync_begins
    keep_delta
    confirm_arm
    as_before=false
    if [ -e "$bundle/sysctls.conf" ]; then sysctls_apply; else unset_sysctls=$r_unset_sysctls; fi
    counters_apply
    "${mode}_delta" || {
        undo_all
        if grep -q 'xtables lock' "$work/refused"; then die 5 "locked: $(cat "$work/refused")"; fi
        # Then the kernel is not what its markers say. A whole bundle finds out, and puts it right.
        answer_full "the kernel refused: $(cat "$work/refused")"
        return 0
    }
    trap '' HUP INT TERM
    conntrack_apply delete
    record_delta
    note_release
    confirm_end true
    sync_ended
    health_sync
    print_change true
}

# Check all files of a delta; the frontends that come are looked at as those of a bundle.
guard_delta() {
    guard_lines services.jsonl.diff '!/^[-+]\{.*\}$/ { refuse("not a line of JSON after a sign") }'
    guard_lines conntrack.udp.diff '!/^[-+]ipv[46] / { refuse("not a frontend after a sign") }'
    if [ -e "$bundle/conntrack.udp.diff" ]; then sed -n 's/^+//p' "$bundle/conntrack.udp.diff" >"$bundle/conntrack.udp"; fi
    guard
}

# Is this where the delta leads already?
delta_applied() {
    previous=$r_generation
    flavour=$r_flavour
    [ "$previous" = "$generation" ] && [ "$r_mode" = "$mode" ] && [ ! -e "$STATE/unsettled" ] || return 1
    came_from=$base base=$generation
    if "${mode}_on_base"; then return 0; fi
    base=$came_from
    return 1
}

# Why a delta cannot be taken here, from the record alone, in $why; nothing if it can.
delta_obstacle() {
    why=
    if ! type "${mode}_delta" >/dev/null 2>&1; then why="mode $mode takes whole bundles only"
    elif [ "$r_mode" != "$mode" ] || [ ! -d "$STATE/bundles/$r_digest" ]; then why="no bundle of mode $mode is recorded"
    elif [ "$r_generation" != "$base" ]; then why="generation $r_generation is recorded, not $base"
    elif [ -e "$STATE/unsettled" ]; then why="a run was cut short"
    fi
}

# The answer when only a whole bundle will do: that is no failure, and nothing was changed unless it says so.
answer_full() {
    say "a whole bundle is needed: $1"
    elapsed
    [ -z "$new_arm" ] || confirm_failed
    printf '{"verb": "%s", "ok": true, "changed": false, "need": "full", "asBefore": %s, "reason": %s, "node": %s, "mode": "%s", ' \
        "$verb" "$as_before" "$(json_string "$1")" "$(json_string "$node")" "$mode"
    printf '"generation": %s, "seconds": %s, "warnings": [%s]}\n' "$(json_or_null "$r_generation")" "$elapsed" "$warnings"
}

# The service ports that change, as compare_services tells them.
delta_services() {
    [ -n "$services$max_removed" ] || return 0
    : >"$work/services"
    [ -e "$bundle/services.jsonl.diff" ] || return 0
    { grep '^+' "$bundle/services.jsonl.diff" || :; grep '^-' "$bundle/services.jsonl.diff" || :; } >"$work/services"
    [ -n "$max_removed" ] || return 0
    share=$(awk -v limit="$max_removed" "$AWK_SHRINK"'
        FNR == NR { count($0); next }
        { line = substr($0, 2) }
        /^\+/ { alive[key(line)] = 1; next }
        !(key(line) in alive) { lose(line) }
        END { refuse("about ", "service ports would be removed", limit) }
        ' "$STATE/bundles/$r_digest/services.jsonl" "$work/services") || die 3 "the comparison of service ports failed (is ${TMPDIR:-/tmp} full?)"
    [ -z "$share" ] || die_shrunken
}

# Keep the delta. As with bundles, before the kernel is touched.
keep_delta() {
    number=$((r_deltas + 1))
    kept_now=$STATE/deltas/$number
    # What the record does not count is not there, so it need not appear whole at once.
    [ ! -e "$kept_now" ] || rm -rf "$kept_now"
    { { [ -d "$STATE/deltas" ] || mkdir "$STATE/deltas"; } && cp -R "$bundle" "$kept_now"; } || {
        rm -rf "$kept_now"
        die 3 "the delta cannot be kept in $STATE (is the disk full?)"
    }
}

# Note the delta as applied.
record_delta() {
    write_applied "$r_digest" "$number"
    [ ! -e "$STATE/seen" ] || rm -f "$STATE/seen"
    outdated="$outdated unsettled"
    if [ "$number" -ge "$DELTAS" ]; then settle store; fi
}

# What apply would do with a delta.
check_delta() {
    guard_delta
    if delta_applied; then
        print_change false
        return 0
    fi
    delta_obstacle
    if [ -z "$why" ] && ! "${mode}_on_base"; then why="the kernel does not have generation $base"; fi
    if [ -n "$why" ]; then
        answer_full "$why"
        return 0
    fi
    previous=$r_generation
    delta_services
    print_change true
}

# Make whole what the record holds in parts: $settled is then the recorded bundle and $work/previous the one before
# the last delta. With "store", for those who hold the lock, as many as are kept are stored, and the record names the last.
settle() {
    count=$r_deltas
    [ "${count:-0}" -gt 0 ] || return 0
    rm -rf "$work/settled" "$work/previous"
    (merge "$work/settled" "$count" && merge "$work/previous" $((count - 1))) || die 3 "deltas could not be merged (is ${TMPDIR:-/tmp} full?)"
    settled=$work/settled
    [ "${1:-}" = store ] || return 0
    set --
    older=$((count - KEEP + 1))
    while [ "$older" -lt $((count - 1)) ]; do
        if [ "$older" -gt 0 ]; then
            rm -rf "$work/older.$older"
            (merge "$work/older.$older" "$older") || die 3 "deltas could not be merged (is ${TMPDIR:-/tmp} full?)"
            set -- "$@" "$work/older.$older"
        fi
        older=$((older + 1))
    done
    mkdir -p "$STATE/bundles"
    for d in "$@" "$work/previous" "$settled"; do
        name=$(value_in "$d/manifest.json" digest)
        if [ ! -d "$STATE/bundles/$name" ]; then
            rm -rf "$STATE/bundles/.new"
            cp -R "$d" "$STATE/bundles/.new"
            mv "$STATE/bundles/.new" "$STATE/bundles/$name"
        fi
        add_history "$name" "$(value_in "$d/manifest.json" generation)"
    done
    while IFS= read -r line; do
        case $line in digest=*) line=digest=$name ;; deltas=*) line=deltas=0 ;; esac
        printf '%s\n' "$line"
    done <"$STATE/applied" >"$STATE/applied.new"
    mv "$STATE/applied.new" "$STATE/applied"
    read_record
    rm -rf "$STATE/deltas"
    settled=
    prune_bundles "$name"
}

# The recorded bundle with the first $2 deltas, as a bundle of its own in $1. Runs in a subshell, and nothing ends it by
# itself: what fails is told by each step.
merge() {
    target=$1 upto=$2 mode=$r_mode
    whole=$STATE/bundles/$r_digest
    generation=$(value_in "$whole/manifest.json" generation)
    cp -R "$whole" "$target" || return 1
    set --
    i=1
    while [ "$i" -le "$upto" ]; do
        d=$STATE/deltas/$i
        set -- "$@" "$d"
        for name in sysctls.conf nfacct.rules health.conf; do [ ! -e "$d/$name" ] || cp "$d/$name" "$target/$name" || return 1; done
        generation=$(value_in "$d/manifest.json" generation)
        i=$((i + 1))
    done
    [ $# -gt 0 ] || return 0
    merge_lines services.jsonl "$@" && merge_lines conntrack.udp "$@" &&
        "${mode}_merge" "$target" "$whole" "$@" && seal "$target" "$generation" && room
}

# A file of one line per Service after its diffs; the order of its lines says nothing.
merge_lines() {
    name=$1
    shift
    [ -e "$whole/$name" ] || return 0
    for d; do [ ! -e "$d/$name.diff" ] || cat "$d/$name.diff" || return 1; done >"$work/diff"
    awk 'FNR == NR { line[++n] = $0; alive[$0] = 1; next }
         /^-/ { delete alive[substr($0, 2)]; next }
         { if (!(substr($0, 2) in alive)) line[++n] = substr($0, 2); alive[substr($0, 2)] = 1 }
         END { for (i = 1; i <= n; i++) if (line[i] in alive) { print line[i]; delete alive[line[i]] } }' \
        "$whole/$name" "$work/diff" >"$target/$name" || return 1
}

# Give the manifest in $1 the digests of the files beside it, and generation $2.
seal() {
    sealed=$1 manifest=$1/manifest.json generation=$2
    manifest_files >"$work/names" || return 1
    set --
    while read -r _ name; do set -- "$@" "$name"; done <"$work/names"
    (cd "$sealed" && sha256sum "$@") >"$work/sums" || return 1
    awk -F '"' -v generation="$generation" '
        FILENAME == ARGV[1] { split($0, part, " "); sum[part[2]] = part[1]; next }
        FILENAME == ARGV[2] { ports++; if (!seen[$4]++) services++; next }
        /^  "digest": / { next }
        /^  "generation": / { print "  \"generation\": \"" generation "\","; next }
        /^    "services": / { sub(/[0-9]+/, services + 0) }
        /^    "servicePorts": / { sub(/[0-9]+/, ports + 0) }
        /^    "/ && $2 in sum { sub(/: "[0-9a-f]+"/, ": \"" sum[$2] "\"") }
        { print }' "$work/sums" "$sealed/services.jsonl" "$manifest" >"$work/manifest" || return 1
    sum=$(sha256sum <"$work/manifest") && is_hex64 "${sum%% *}" || return 1
    { sed '$d' "$work/manifest" && printf '  "digest": "%s"\n}\n' "${sum%% *}"; } >"$manifest"
}

# What a delta means to iptables: changed chains whole, and -X for those that go.
iptables_on_base() {
    for fam in $FAMILIES; do
        rules_file "$fam"
        [ -n "$file" ] || continue
        ipt "$fam"
        for t in filter nat; do
            case $("$ipt" -w 5 -t "$t" -S KUBE-PROXY-GENERATION 2>/dev/null) in
                *" --comment $base" | *" --comment \"$base\"") ;;
                *) return 1 ;;
            esac
        done
    done
}

iptables_delta() {
    for fam in $FAMILIES; do
        rules_file "$fam"
        [ -n "$file" ] || continue
        iptables_switch "$fam" "$file" && continue
        # The other family may have its part already: back to what is recorded, by comparison.
        mv "$work/refused" "$work/delta.refused"
        delta=$bundle
        settle
        recorded_bundle
        bundle=$recorded
        iptables_read
        if [ -n "$flavour_trouble" ]; then left_unfinished "the recorded rules could not be put back: $flavour_trouble"
        else
            iptables_compare
            iptables_commit || left_unfinished "the recorded rules could not be put back: $(cat "$work/refused")"
        fi
        bundle=$delta
        mv "$work/delta.refused" "$work/refused"
        return 1
    done
}

iptables_merge() {
    target=$1 whole=$2
    shift 2
    for name in iptables.rules ip6tables.rules; do
        [ -e "$whole/$name" ] || continue
        for d; do [ ! -e "$d/$name" ] || cat "$d/$name" || return 1; done >"$work/diff"
        awk -v generation="$generation" '
            function put(t, c) { if ((t, c) in rules) printf "%s", rules[t, c]; written[t, c] = 1 }
            # ---- the deltas: the last text of each chain that they touch
            pass == 1 && /^\*/ { t = substr($1, 2); next }
            pass == 1 && /^:/ { c = substr($1, 2); if (!((t, c) in touched)) order[++n] = t SUBSEP c; touched[t, c] = 1; delete gone[t, c]; rules[t, c] = ""; next }
            pass == 1 && /^-A / { rules[t, $2] = rules[t, $2] $0 "\n"; next }
            pass == 1 && /^-X / { gone[t, $2] = 1; next }
            pass == 1 { next }
            # ---- first look at the bundle: which chains it has
            pass == 2 { if (/^\*/) t = substr($1, 2); else if (/^:/) declared[t, substr($1, 2)] = 1; next }
            # ---- and then write it again, with the new text in place of the old
            FNR == 1 { sub(/generation [0-9a-f]+/, "generation " generation) }
            /^\*/ {
                t = substr($1, 2)
                print
                for (i = 1; i <= n; i++) {
                    split(order[i], p, SUBSEP)
                    if (p[1] == t && !(order[i] in declared) && !(order[i] in gone)) print ":" p[2] " - [0:0]"
                }
                next
            }
            /^:/ { if (!((t, substr($1, 2)) in gone)) print; next }
            /^-A / {
                if ($2 == "KUBE-PROXY-GENERATION") rest(t)
                if ((t, $2) in gone) next
                if (!((t, $2) in touched)) print
                else if (!((t, $2) in written)) put(t, $2)
                next
            }
            /^# all services$/ { for (i = 1; i <= n; i++) { split(order[i], p, SUBSEP); if (p[1] == t && !(order[i] in declared) && !(order[i] in gone)) put(t, p[2]) } }
            { print }
            # Chains that had no rules in the bundle.
            function rest(t,   i, p) {
                for (i = 1; i <= n; i++) {
                    split(order[i], p, SUBSEP)
                    if (p[1] == t && p[2] != "KUBE-PROXY-GENERATION" && !(order[i] in gone) && !(order[i] in written)) put(t, p[2])
                }
            }
            ' pass=1 "$work/diff" pass=2 "$whole/$name" pass=3 "$whole/$name" >"$target/$name" || return 1
    done
}

# What a delta means to nftables: commands, to be run as they stand. Chains that are flushed but not added go.
nftables_on_base() {
    need nft nftables
    awk '$2 == "table" && $4 == "kube-proxy" { had[$3] = $1 == "delete" ? "yes" : "no" }
         $2 == "table" && $4 == "kube-proxy-generation" { if (!($3 in had)) had[$3] = "yes" }
         END { for (f in had) print f, had[f] }' "$bundle/nftables.nft" >"$work/families" && [ -s "$work/families" ] || return 1
    while read -r f had; do
        if [ "$had" = yes ]; then marker=$base; else marker=; fi
        [ "$(nft_marker "$f")" = "$marker" ] || return 1
    done <"$work/families"
}

# One transaction, so there is nothing to undo, and no need to ask first.
nftables_delta() {
    awk '$2 == "chain" && $1 == "add" { added[$3, $5] = 1 }
         $2 == "chain" && $1 == "flush" && !(($3, $5) in added) { print "delete chain " $3 " kube-proxy " $5 }' "$bundle/nftables.nft" >"$work/gone" || {
        echo "the delta cannot be read (is ${TMPDIR:-/tmp} full?)" >"$work/refused"
        return 1
    }
    : >"$STATE/unsettled"
    trap '' HUP INT TERM
    nft_run "$bundle/nftables.nft" || {
        # A tool can die on its way back: then the kernel has it all the same.
        if nftables_on_base; then rm -f "$STATE/unsettled"; else left_unfinished "the kernel does not have generation $base any more"; fi
        return 1
    }
    nft_drop "$work/gone"
}

# Run the commands of all files in mind, and keep those whose effect lasts, in their order.
nftables_merge() {
    target=$1 whole=$2
    shift 2
    for d; do
        shift
        set -- "$@" "$d/nftables.nft"
    done
    awk -v generation="$generation" '
        function kill(i) { if (i) line[i] = "" }
        function kill_all(list,   n, i, part) { n = split(list, part, " "); for (i = 1; i <= n; i++) line[part[i]] = "" }
        # Chains that the file before only flushed are gone.
        function finish(   key) {
            for (key in flushed) if (!(key in added)) { kill(made[key]); kill(flush[key]); delete made[key]; delete flush[key] }
            split("", flushed)
            split("", added)
        }
        FNR == 1 { finish(); file++; if (file == 1) { sub(/generation [0-9a-f]+/, "generation " generation); line[++n] = $0 } next }
        /^#/ || /^$/ { if (file == 1) line[++n] = $0; next }
        $4 == "kube-proxy-generation" { if ($1 == "delete") marked[$3] = 1; next }
        { key = $3 SUBSEP $2 SUBSEP $5 }
        $2 == "table" {
            if ($1 == "delete") { for (i = 1; i <= n; i++) if (index(line[i], " " $3 " kube-proxy")) line[i] = ""; delete table[$3]; delete marked[$3]; next }
            if (!($3 in table)) { line[++n] = $0; table[$3] = 1 }
            next
        }
        $2 == "element" {
            text = substr($0, index($0, "{ ") + 2)
            sub(/( comment "[^"]*")?( : [^}]*)? \}$/, "", text)
            if ($1 == "delete") { kill(element[$3, $5, text]); delete element[$3, $5, text] }
            else { kill(element[$3, $5, text]); line[++n] = $0; element[$3, $5, text] = n }
            next
        }
        $2 == "rule" { line[++n] = $0; rules[$3, $5] = rules[$3, $5] " " n; next }
        $1 == "delete" { kill(made[key]); kill(flush[key]); delete made[key]; delete flush[key]; next }
        $1 == "flush" {
            if ($2 == "chain") { kill_all(rules[$3, $5]); delete rules[$3, $5]; if (file > 1) flushed[key] = 1 }
            if (!(key in flush)) { line[++n] = $0; flush[key] = n }
            next
        }
        {
            if (file > 1) added[key] = 1
            if (!(key in made)) { line[++n] = $0; made[key] = n } else line[made[key]] = $0
        }
        END {
            finish()
            for (i = 1; i <= n; i++) if (line[i] != "") print line[i]
            for (f in table) if (f in marked) print "add table " f " kube-proxy-generation\ndelete table " f " kube-proxy-generation\nadd table " f " kube-proxy-generation { comment \"" generation "\" ; }"
        }' "$whole/nftables.nft" "$@" >"$target/nftables.nft"
}

# What a delta means to ipvs: changed chains whole, and the commands that make the difference to all else.
# Whether the kernel is on the base is left to the transaction itself, which begins with the deletion of its marker.
ipvs_on_base() {
    # A set that is made otherwise than before, or no longer, takes a comparison with the kernel.
    if [ -e "$bundle/ipset.rules" ]; then
        grep -q -e '^create ' -e '^destroy ' "$bundle/ipset.rules" && return 1
        [ $? -eq 1 ] || return 1
    fi
    if [ "$verb" = check ] || [ "$base" = "$generation" ]; then iptables_on_base; fi
}

ipvs_delta() {
    plan=$work
    set --
    if [ -s "$STATE/draining" ]; then set -- pass=draining "$STATE/draining"; fi
    for name in ipset.rules ipvs.rules ip.batch iptables.rules ip6tables.rules; do
        [ ! -e "$bundle/$name" ] || set -- "$@" "pass=$name" "$bundle/$name"
    done
    awk -v out="$plan" -v base="$base" '
        BEGIN {
            n = split(ENVIRON["JUMPS"], row, "\n")
            for (i = 1; i <= n; i++) {
                split(row[i], word, " ")
                if (word[1] == "ipvs") check[word[2]] = check[word[2]] "-C" substr(row[i], 6 + length(word[2])) "\n"
            }
        }
        # What is being told to leave may come back, or lose its virtual server.
        pass == "draining" { leaves[$1 " " $2, $3] = 1; next }
        pass == "ipset.rules" { print > (out "/sets." $1); next }
        pass == "ip.batch" { print > (out "/addresses." $2); next }
        pass == "ipvs.rules" && $1 == "-d" {
            if ($2 == "-t") told = told "-e " $2 " " $3 " -r " $5 " -m -w 0\n"
            print $2, $3, $5, 1 > (out "/leaving")
            next
        }
        pass == "ipvs.rules" && $1 == "-a" && ($2 " " $3, $5) in leaves { sub(/^-a/, "-e"); delete leaves[$2 " " $3, $5] }
        pass == "ipvs.rules" && $1 == "-D" { gone[$2 " " $3] = 1 }
        pass == "ipvs.rules" { print > (out ($1 == "-D" ? "/servers.del" : "/servers.add")); next }
        /^#/ { next }
        /^COMMIT/ { printf "%s", check[table] > (out "/" pass) }
        { print > (out "/" pass) }
        /^\*/ { table = substr($1, 2); print "-D KUBE-PROXY-GENERATION -m comment --comment " base > (out "/" pass) }
        END {
            # After what comes, and with it: those that leave get no new connections.
            if (told != "") printf "%s", told > (out "/servers.add")
            for (key in leaves) {
                split(key, part, SUBSEP)
                if (!(part[1] in gone)) print part[1] " " part[2] " 1" > (out "/leaving")
            }
        }' "$@" || {
        echo "the delta cannot be read (is ${TMPDIR:-/tmp} full?)" >"$work/refused"
        return 1
    }
    : >"$STATE/unsettled"
    trap '' HUP INT TERM
    for fam in $FAMILIES; do
        case $fam in 4) file=$plan/iptables.rules ;; 6) file=$plan/ip6tables.rules ;; esac
        if [ ! -e "$file" ] || iptables_restore "$fam" "$file"; then continue; fi
        # Refused at the marker or at a jump: this kernel is not what the delta was made for. A table may have been
        # changed before the other one was found wanting, so this stays unsettled until a whole bundle comes.
        if grep -q -e '-- -[CD] ' "$work/refused"; then
            rm -rf "$kept_now"
            answer_full "the kernel does not have generation $base"
            answered=1
            exit 0
        fi
        ipvs_to_record
        return 1
    done
    ipvs_settings || { ipvs_to_record; return 1; }
    ipvs_add "$plan" || { ipvs_to_record; return 1; }
    ipvs_let_go "$plan/leaving" "$plan/servers.del" && ipvs_del "$plan" && return 0
    ipvs_to_record
    return 1
}

# The timeouts of the delta, if it has any.
ipvs_settings() {
    [ -s "$bundle/ipvs.conf" ] || return 0
    sed -n 's/^timeouts //p' "$bundle/ipvs.conf" >"$plan/timeouts"
}

# Back to what is recorded, by comparison.
ipvs_to_record() {
    mv "$work/refused" "$work/delta.refused"
    delta=$bundle
    settle
    recorded_bundle
    bundle=$recorded
    ipvs_read
    if [ -n "$flavour_trouble" ]; then left_unfinished "the recorded state could not be put back: $flavour_trouble"
    elif ipvs_compare && ipvs_commit; then [ -n "$unfinished" ] || rm -f "$STATE/unsettled"; else left_unfinished "the recorded state could not be put back: $(cat "$work/refused")"; fi
    bundle=$delta
    mv "$work/delta.refused" "$work/refused"
}

ipvs_merge() {
    iptables_merge "$@" || return 1
    target=$1 whole=$2
    shift 2
    for name in ipset.rules ipvs.rules ip.batch; do
        for d; do [ ! -e "$d/$name" ] || cat "$d/$name" || return 1; done >"$work/diff"
        awk '
            function come(group, text) { if (!((group, text) in alive)) { item[group, ++count[group]] = text; alive[group, text] = count[group] } }
            function go(group, text) { if ((group, text) in alive) { item[group, alive[group, text]] = ""; delete alive[group, text] } }
            function open(group, text) { if (!(group in head)) order[++m] = group; head[group] = text }
            function shut(group,   i) { for (i = 1; i <= count[group]; i++) delete alive[group, item[group, i]]; count[group] = 0; delete head[group] }
            $1 == "create" { open($2, $0); next }
            $1 == "add" { come($2, $3); next }
            $1 == "del" { go($2, $3); next }
            $1 == "link" { open("", $0); next }
            $1 == "addr" { if ($2 == "add") come("", $3); else go("", $3); next }
            $1 == "-A" || $1 == "-E" { open($2 " " $3, substr($0, 4)); next }
            $1 == "-a" { come($2 " " $3, $5); next }
            $1 == "-d" { go($2 " " $3, $5); next }
            $1 == "-D" { shut($2 " " $3); next }
            END {
                for (i = 1; i <= m; i++) if (order[i] in head) {
                    group = order[i]
                    server = group ~ /^-/
                    print (server ? "-A " : "") head[group]
                    for (k = 1; k <= count[group]; k++) if (item[group, k] != "") {
                        if (server) print "-a " group " -r " item[group, k] " -m -w 1"
                        else if (group == "") print "addr add " item[group, k] " dev kube-ipvs0"
                        else print "add " group " " item[group, k]
                    }
                    delete head[group]
                }
            }' "$whole/$name" "$work/diff" >"$target/$name" || return 1
    done
    for d; do [ ! -e "$d/ipvs.conf" ] || cp "$d/ipvs.conf" "$target/ipvs.conf" || return 1; done
}

