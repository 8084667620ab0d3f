# shellcheck shell=sh disable=SC2034,SC2119,SC2120,SC2153,SC2154
# ---------------------------------------------------------------- Pull
# Fetch what was published for this node (akp publish), verify it, apply it. Nothing that the server or the way to it
# does can change what is applied: a release is signed, names the sizes and digests of what it offers, and never goes
# back. In the state directory, pull/ holds
#   release     what was fetched and applied last; validator: how the server called it
#   last        the answer of the last run
#   part.*      a download that was cut short, to be resumed
PULLED_LIMIT=1000000     # bytes of a release of one node
jitter=0

verb_pull() {
    signed_only || die 2 "pull needs to know whose releases count: put their keys into $ETC/allowed_signers"
    url=$(setting url)
    [ -n "$url" ] || die 2 "$ETC/node.conf does not say where to pull from; add a line: url https://SERVER/DIRECTORY"
    url=${url%/}
    case $url in
        http://* | https://*) choose_fetcher ;;
        file:///*) url=${url#file://} ;;
        /*) ;;
        *) die 2 "$ETC/node.conf: url \"$url\" is not one of http://, https://, file:/// or a path" ;;
    esac
    runs_from_file || die 2 "pull runs from a file only: install the program, e.g. as /usr/local/sbin/akp-node"
    me=$(this_node)
    case $me in '' | .* | *[!A-Za-z0-9._-]*) die 2 "\"$me\" is no name of a node, set it in $ETC/node.conf: node NAME" ;; esac
    # The same for every poll of a node and another for each node: polls spread, and stay a period apart.
    if [ "$jitter" -gt 0 ]; then
        sleep "$(printf '%s' "$me" | cksum | awk -v range="$jitter" '{ print $1 % (range + 1) }')"
        # After an hour others have taken the work directory for one that a killed run left.
        rm -rf "$work"
        make_work
        case $url in /*) ;; *) choose_fetcher ;; esac
    fi
    now
    started=$now
    pull_lock
    read_record
    PULL=$STATE/pull
    fetched='' reason='' healed=false bytes=0 by_delta=false
    fetch_release
    case $fetched in
        new) take_release ;;
        *) heal ;;
    esac
    case $fetched in
        offline | absent) warn "nothing could be pulled, this node keeps what it has: $reason" ;;
        unchanged) release_still_good ;;
    esac
    pull_answer "${changed:-$healed}"
}

# One pull at a time; a second one ends with 5.
pull_lock() {
    need flock util-linux
    [ -d "$STATE/pull" ] || mkdir -p "$STATE/pull" 2>/dev/null || die 3 "cannot make the state directory $STATE/pull"
    exec 8>>"$STATE/pull/lock"
    flock -n 8 || die 5 "locked: another pull is under way"
}

# curl, or wget; which one, and what it can do, is known before anything is asked of it.
choose_fetcher() {
    fetcher=$(setting fetcher)
    if [ -z "$fetcher" ]; then
        if has curl; then fetcher=curl; else fetcher=wget; fi
    fi
    case $fetcher in
        curl) need curl curl ;;
        wget)
            need wget "curl or wget"
            wget --version 2>/dev/null | grep -q 'GNU Wget' || fetcher=busybox
            ;;
        *) die 2 "$ETC/node.conf: fetcher is curl or wget, not \"$fetcher\"" ;;
    esac
    if [ "$fetcher" = busybox ] && [ -n "$(setting ca)$(setting certificate)$(setting key)" ]; then
        die 3 "missing feature: this wget (busybox) takes neither CA nor client certificates, install curl"
    fi
    : >"$work/fetcher.conf"
    for name in ca:cacert:ca_certificate certificate:cert:certificate key:key:private_key; do
        file=$(setting "${name%%:*}")
        [ -n "$file" ] || continue
        [ -r "$file" ] || die 2 "$ETC/node.conf: ${name%%:*} $file cannot be read"
        name=${name#*:}
        if [ "$fetcher" = curl ]; then printf '%s = "%s"\n' "${name%:*}" "$file"; else printf '%s = %s\n' "${name#*:}" "$file"; fi >>"$work/fetcher.conf"
    done
    proxy=$(setting proxy)
    case $proxy in
        '') ;;
        none) unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY ;;
        *)
            http_proxy=$proxy https_proxy=$proxy
            export http_proxy https_proxy
            unset no_proxy NO_PROXY
            ;;
    esac
}

# fetch URL FILE LIMIT [HEADER]: get URL into FILE, which may have a part of it already and never gets much more than
# LIMIT bytes: 64 KiB are left for what the server says about it. $status is then the HTTP status, or 000 with $reason; $work/headers what the server said.
fetch() {
    from=$1 to=$2
    limit=$(($3 / 512 + 128))
    header=${4:-}
    set --
    if [ "$fetcher" = curl ]; then
        [ ! -s "$to" ] || set -- "$@" --continue-at -
        [ -z "$header" ] || set -- "$@" --header "$header"
        status=$(
            ulimit -f "$limit"
            curl --config "$work/fetcher.conf" --silent --show-error --fail --location --max-redirs 3 --proto =http,https --connect-timeout 10 \
                --speed-limit 100 --speed-time 30 --dump-header "$work/headers" --output "$to" \
                --write-out '%{http_code}' "$@" "$from" 2>"$work/fetch.err"
        ) || :
        # The status alone does not say that all of it came.
        case $status in 2??) [ ! -s "$work/fetch.err" ] || status=000 ;; 304 | [45]??) ;; *) status=000 ;; esac
    else
        if [ "$fetcher" = wget ]; then set -- --config="$work/fetcher.conf" -t 1 -T 30
        elif wget --help 2>&1 | grep -q -e ' -T SEC'; then set -- -T 30
        fi
        [ ! -s "$to" ] || set -- "$@" -c
        [ -z "$header" ] || set -- "$@" --header "$header"
        ended=0
        (
            ulimit -f "$limit"
            exec wget -S -O "$to" "$@" "$from"
        ) >/dev/null 2>"$work/fetch.err" || ended=$?
        sed -n 's/^ *\([A-Za-z-]*: .*\)$/\1/p; s/^ *\(HTTP\/.*\)$/\1/p' "$work/fetch.err" >"$work/headers"
        status=$(sed -n 's/.*HTTP\/[0-9.]* \([0-9][0-9][0-9]\).*/\1/p' "$work/fetch.err" | tail -n 1)
        case $ended:$status in 0:) status=200 ;; 0:2??) ;; 0:*) status=000 ;; *:304 | *:[45]??) ;; *) status=000 ;; esac
    fi
    case $status in 2?? | 304) return 0 ;; esac
    reason=$(tail -n 1 "$work/fetch.err" | cut -c 1-300)
    reason="$from: ${reason:-no answer}"
}

# The release of this node into $work/fetched. $fetched is then new, unchanged, absent (the server has none for this
# node) or offline.
fetch_release() {
    rm -f "$PULL"/*.new
    case $url in
        /*)
            if [ -r "$url/$me.release" ]; then head -c "$PULLED_LIMIT" "$url/$me.release" >"$work/fetched" && fetched=new
            elif [ -d "$url" ]; then fetched=absent reason="$url/$me.release: no such file"
            else fetched=offline reason="$url: no such directory (is the share mounted?)"
            fi
            ;;
        *)
            fetch "$url/$me.release" "$work/fetched" "$PULLED_LIMIT" "$(condition)"
            case $status in
                2??) fetched=new ;;
                304) fetched=unchanged ;;
                404 | 410) fetched=absent ;;
                *) fetched=offline ;;
            esac
            ;;
    esac
    [ "$fetched" != new ] || validator >"$work/validator"
    if [ "$fetched" = new ] && cmp -s "$work/fetched" "$PULL/release"; then fetched=unchanged; fi
}

# The header that asks for a release only if it is another than the one that was applied.
condition() {
    [ -s "$PULL/release" ] && [ -r "$PULL/validator" ] || return 0
    { read -r known && read -r line; } <"$PULL/validator" || return 0
    [ "$known" != "$url" ] || printf '%s' "$line"
}

# The same of the release that was just fetched, for the next time; an ETag before a date.
validator() {
    printf '%s\n' "$url"
    [ ! -r "$work/headers" ] || tr -d '\r' <"$work/headers" | awk '
        /^HTTP\// { etag = ""; date = "" }
        tolower($1) == "etag:" { sub(/^[^:]*: */, ""); etag = $0 }
        tolower($1) == "last-modified:" { sub(/^[^:]*: */, ""); date = $0 }
        END { if (etag != "") print "If-None-Match: " etag; else if (date != "") print "If-Modified-Since: " date; else print "" }'
}

# Verify the fetched release, get what it offers, apply it, remember it.
take_release() {
    split_release
    copy_release "$work/split"
    verify_release
    offered=$(awk -v node="$me" '$1 == "bundle" && $2 == node { print $3, $4; exit }' "$work/release/release")
    [ -n "$offered" ] || die 2 "the release is not for this node: it names no bundle of \"$me\""
    wanted=${offered% *}
    have=$r_generation
    if [ "$have" = "$wanted" ]; then
        # Nothing new, signed anew.
        count_signers same
        if [ -z "$dry_run" ]; then
            lock
            check_age
            note_release
            exec 9>&-
        fi
        heal
    else
        delta=$(awk -v node="$me" -v base="$have" -v to="$wanted" '$1 == "delta" && $2 == node && $3 == base && $4 == to { print $5; exit }' "$work/release/release")
        # Without its base in the kernel a delta is of no use, and so the full bundle is the second try.
        if [ -n "$delta" ] && take_object "$delta" && [ "$changed" != full ]; then by_delta=true; else
            take_object "${offered#* }" || die 2 "$reason"
        fi
    fi
    [ -z "$dry_run" ] || return 0
    { cp "$work/validator" "$PULL/validator.new" && cp "$work/fetched" "$PULL/release.new"; } || die 3 "the release cannot be kept in $PULL (is the disk full?)"
    mv "$PULL/validator.new" "$PULL/validator"
    mv "$PULL/release.new" "$PULL/release"
    rm -f "$PULL"/part.*
}

# The text and the signatures of $work/fetched as files in $work/split.
split_release() {
    mkdir -p "$work/split"
    awk -v dir="$work/split" '
        /^-----BEGIN SSH SIGNATURE-----$/ { file = dir "/release" (n ? "." n : "") ".sig"; n++ }
        file == "" { print > (dir "/release"); next }
        n <= 99 { print > file }' "$work/fetched"
    [ -s "$work/split/release" ] || die 2 "$url/$me.release is empty, or no release"
}

# Fetch the archive of the bundle or delta with digest $1, and apply it. False with $reason if it cannot be had.
take_object() {
    found=$(awk -v digest="$1" '$1 == "object" && $2 == digest { print $3, $4; exit }' "$work/release/release")
    sum=${found% *} size=${found#* }
    if ! is_hex64 "$sum"; then
        reason="the release does not say where $1 is"
        return 1
    fi
    limit=$(setting limit 268435456)
    [ "$size" -le "$limit" ] || die 2 "what is offered has $size bytes, more than $limit ($ETC/node.conf: limit)"
    part=$PULL/part.$sum
    for file in "$PULL"/part.*; do [ "$file" = "$part" ] || rm -f "$file"; done
    # A part that was resumed may be of something else; then once more from the start.
    for try in 1 2; do
        [ "$(size_of "$part")" -lt "$size" ] || [ "$(sum_of "$part")" = "$sum" ] || rm -f "$part"
        resumed=$(size_of "$part")
        if [ "$resumed" -lt "$size" ]; then
            case $url in
                /*)
                    status=200
                    cp "$url/objects/$sum" "$part" 2>/dev/null || { status=000 reason="$url/objects/$sum cannot be read"; }
                    ;;
                *) fetch "$url/objects/$sum" "$part" "$size" ;;
            esac
            bytes=$((bytes + $(size_of "$part") - resumed))
        fi
        [ "$(sum_of "$part")" != "$sum" ] || break
        # Cut short without having been resumed: the next pull goes on where this one ended.
        if [ "$resumed" = 0 ] && [ "$(size_of "$part")" -lt "$size" ] && [ "${status:-000}" = 000 ]; then return 1; fi
        rm -f "$part"
        if [ "$resumed" = 0 ] || [ "$try" = 2 ]; then
            case ${status:-200} in 2??) reason="$url/objects/$sum: what came is not what the release names (tampered with, or cut short)" ;; esac
            return 1
        fi
    done
    rm -rf "$work/pulled"
    unpack "$work/pulled" <"$part"
    cp "$work/release"/release* "$work/pulled/"
    run_verb "$(if [ -n "$dry_run" ]; then echo check; else echo apply; fi)" --node "$me" "$work/pulled"
    if grep -q '"need": "full"' "$work/verb"; then changed=full
    elif grep -q '"changed": true' "$work/verb"; then changed=true
    else changed=false
    fi
}

size_of() { if [ -f "$1" ]; then wc -c <"$1" | tr -d ' '; else echo 0; fi; }
sum_of() { if [ -f "$1" ]; then sha256sum <"$1" | cut -d ' ' -f 1; fi; }

# Run another verb of this program; its answer is the last line of $work/verb. If it fails, so does this one.
run_verb() {
    ended=0 so_far=$as_before
    as_before=false
    sh "$0" "$@" >"$work/verb" || ended=$?
    read_record
    case $(sed -n '$p' "$work/verb") in *'"asBefore": false'*) ;; *'"asBefore": true'* | *'"ok": true, "changed": false'*) as_before=$so_far ;; esac
    warned=$(sed -n '$s/^.*"warnings": \[\(.*\)\]}$/\1/p' "$work/verb")
    [ -z "$warned" ] || warnings="$warnings${warnings:+, }$warned"
    [ "$ended" -ne 0 ] || return 0
    why=$(sed -n '$s/.*"error": "\(.*\)", "warnings": .*/\1/p' "$work/verb" | sed 's/\\\(["\\]\)/\1/g')
    die "$ended" "${why:-$1 ended with $ended and no answer}"
}

# A node without news still has what was applied, or gets it back.
heal() {
    changed=false
    [ -n "$r_digest" ] && [ -z "$dry_run" ] || return 0
    if [ -z "$verify" ] && (seen_still) 2>/dev/null; then return 0; fi
    # Up to a certain size a comparison of every rule is cheap, and leaves what the next look needs to be cheaper still.
    set --
    recorded_bundle
    if [ -n "$verify" ] || [ "$(cat "$recorded"/*.rules "$recorded"/*.nft 2>/dev/null | wc -c)" -le "$GLIMPSE_LIMIT" ]; then set -- --verify; fi
    run_verb restore "$@"
    if grep -q '"changed": true' "$work/verb"; then healed=true; fi
    changed=$healed
}

# Of a node that polls in vain somebody should know before its rules are too old to be right.
release_still_good() {
    if awk -v now="$(date +%s)" '$1 == "expires" { exit $2 + 0 > now + 0 }' "$PULL/release"; then
        warn "the release that this node has expired: nobody publishes any more (or is the clock of this host wrong?)"
    fi
}

# The result of pull.
pull_answer() {
    elapsed
    text=$(
        printf '{"verb": "pull", "ok": true, "changed": %s, "fetched": "%s", "node": %s, ' "$1" "$fetched" "$(json_string "$me")"
        printf '"generation": %s, "counter": %s, ' "$(json_or_null "$r_generation")" "$(c=$(applied_counter); printf '%s' "${c:-null}")"
        printf '"delta": %s, "healed": %s, "bytes": %d, ' "$by_delta" "$healed" "$bytes"
        printf '"seconds": %s, "warnings": [%s]}' "$elapsed" "$warnings"
    )
    printf '%s\n' "$text"
    pull_end "$text"
}

# Keep the answer $1, and report it where node.conf says; also called when pull fails.
pull_end() {
    [ -d "$STATE/pull" ] && [ -n "${me:-}" ] && [ -z "$dry_run" ] || return 0
    { printf '%s\n' "$1" >"$STATE/pull/last.new" && mv "$STATE/pull/last.new" "$STATE/pull/last"; } 2>/dev/null || return 0
    to=$(setting report)
    [ -n "$to" ] || return 0
    # What is nothing new is said once an hour: a poll without news is one request.
    case $1 in *'"ok": true, "changed": false, "fetched": "unchanged"'*)
        last=0
        [ ! -r "$STATE/pull/reported" ] || read -r last <"$STATE/pull/reported" || :
        [ $(($(date +%s) - last)) -ge 3600 ] || return 0
        ;;
    esac
    case $to in */) to=$to$me.json ;; esac
    if report_to "$to"; then date +%s >"$STATE/pull/reported"; else say "warning: the report could not be left at $to"; fi
}

# $STATE/pull/last to a file, or by HTTP PUT.
report_to() {
    case $1 in
        http://* | https://*) ;;
        *)
            to=${1#file://}
            { cp "$STATE/pull/last" "$to.new" && chmod 644 "$to.new" && mv "$to.new" "$to"; } 2>/dev/null
            return
            ;;
    esac
    [ -n "${fetcher:-}" ] || choose_fetcher
    case $fetcher in
        curl) curl --config "$work/fetcher.conf" --silent --fail --connect-timeout 10 --max-time 30 --upload-file "$STATE/pull/last" "$1" ;;
        wget) wget --config="$work/fetcher.conf" -q -T 30 -t 1 -O /dev/null --method=PUT --body-file="$STATE/pull/last" "$1" ;;
        *) false ;;
    esac >/dev/null 2>&1
}

