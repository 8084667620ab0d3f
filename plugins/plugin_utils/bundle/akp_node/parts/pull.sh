# shellcheck shell=sh disable=SC2034,SC2154,SC2317,SC3043
# Copyright (c) the agentless.kube_proxy authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
#
# akp-pull [--jitter S] [--verify] [--dry-run] - fetch what was published for this node (akp publish), and have akp-node apply it.
#
# Nothing that the server or the way to it does can change what is applied: akp-node verifies the release before anything
# that it names is fetched, and once more with the bundle. In the state directory, pull/ holds
#   release, validator   what was fetched and applied last, and how the server called it
#   last, reported       the answer of the last run, and when it was reported
#   part.*               a download that was cut short, to be resumed
# Where akp-metrics lies beside this program, it is run after each poll.
set -eu
umask 077
LC_ALL=C
PATH=${AKP_PATH:+$AKP_PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin${PATH:+:$PATH}
export LC_ALL PATH
STATE=${AKP_STATE:-/var/lib/akp} ETC=${AKP_ETC:-/etc/akp} PULL=${AKP_STATE:-/var/lib/akp}/pull
RELEASE_LIMIT=1000000    # bytes of a release of one node
VERIFY_LIMIT=500000      # bytes of rules up to which every poll compares all of them
verify='' dry_run='' jitter=0    # options
me='' url='' fetcher='' work='' node=''    # this Node, where it pulls from and how; the work directory; akp-node
r_generation='' r_snapshot='' status='' reason=''    # the record of akp-node; the HTTP status of the last fetch, 000 without an answer, and why it failed
fetched='' changed=false healed=false by_delta=false bytes=0 as_before=true warnings=''    # the result
answered='' started=0 reply=''

say() { printf 'akp-pull: %s\n' "$*" >&2; }
has() { command -v "$1" >/dev/null 2>&1; }
need() { has "$1" || die 3 "missing tool: $1 (package $2)"; }

# reply is text as a JSON string.
json_string() { reply="\"$(printf '%s' "$1" | tr -c ' -~' ' ' | sed 's/[\\"]/\\&/g')\""; }

# Note a warning; it appears on stderr and in the answer.
warn() {
    say "warning: $1"
    json_string "$1"
    warnings="$warnings${warnings:+, }$reply"
}

# End with an exit code and its JSON.
die() {
    say "$2"
    json_string "$2"
    finish "$1" "{\"verb\": \"pull\", \"ok\": false, \"code\": $1, \"asBefore\": $as_before, \"error\": $reply, \"warnings\": [$warnings]}"
}

# Print the answer $2, keep and report it, and end with $1.
finish() {
    answered=1
    printf '%s\n' "$2"
    [ -z "$work" ] || [ -n "$dry_run" ] || report "$2"
    exit "$1"
}

# The end of every run: the work directory goes, and a run that was cut short says so.
leave() {
    trap '' HUP INT TERM EXIT
    [ -z "$work" ] || rm -rf "$work"
    work=''
    [ -n "$answered" ] || case $1 in 143) die 143 "ended by a signal" ;; *) die 3 "ended in the middle, see the messages above (is a disk full?)" ;; esac
}

# include tools/setting.sh

# Read the record of akp-node.
read_record() {
    local key value
    r_generation='' r_snapshot=''
    [ -r "$STATE/record" ] || return 0
    while IFS='=' read -r key value; do case $key in snapshot) r_snapshot=$value ;; generation) r_generation=$value ;; esac; done <"$STATE/record"
}

# Run a verb of akp-node; its answer is in reply. If the verb fails, so does this run, with the same code and reason.
run_node() {
    local ended why
    ended=0
    sh "$node" "$@" >"$work/answer" || ended=$?
    read_record
    reply=$(tail -n 1 "$work/answer")
    case $reply in *'"asBefore": false'*) as_before=false ;; *'"asBefore": true'* | *'"ok": true, "changed": false'* | *'"verb": "release", "ok": true'*) ;; *) as_before=false ;; esac
    case $reply in *'"warnings": ['?*']}') why=${reply##*'"warnings": ['} warnings="$warnings${warnings:+, }${why%']}'}" ;; esac
    [ "$ended" -ne 0 ] || return 0
    why=$(printf '%s\n' "$reply" | sed -n 's/.*"error": "\(.*\)", "warnings": .*/\1/p' | sed 's/\\\(["\\]\)/\1/g')
    die "$ended" "${why:-akp-node $1 ended with $ended and no answer}"
}

# ---------------------------------------------------------------- Fetch
# Choose curl or wget, and write what both need to know of certificates and the proxy.
choose_fetcher() {
    local name file
    if has curl; then setting fetcher curl; else setting fetcher wget; fi
    fetcher=$reply
    case $fetcher in curl | wget) need "$fetcher" "curl or wget" ;; *) die 2 "$ETC/node.conf: fetcher is curl or wget, not \"$fetcher\"" ;; esac
    [ "$fetcher" = curl ] || wget --version 2>/dev/null | grep -q 'GNU Wget' || fetcher=busybox
    : >"$work/fetcher.conf"
    for name in ca:cacert:ca_certificate certificate:cert:certificate key:key:private_key; do
        setting "${name%%:*}"
        file=$reply
        [ -n "$file" ] || continue
        [ "$fetcher" != busybox ] || die 3 "missing feature: this wget (busybox) takes neither CA nor client certificates, install curl"
        [ -r "$file" ] || die 2 "$ETC/node.conf: ${name%%:*} $file cannot be read"
        name=${name#*:}
        if [ "$fetcher" = curl ]; then printf '%s = "%s"\n' "${name%:*}" "$file"; else printf '%s = %s\n' "${name#*:}" "$file"; fi >>"$work/fetcher.conf"
    done
    setting proxy
    [ -n "$reply" ] || return 0
    unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY no_proxy NO_PROXY
    [ "$reply" = none ] || export http_proxy="$reply" https_proxy="$reply"
}

# Get URL $1 into file $2, which may have a part of it already and never gets much more than $3 bytes (64 KiB are left for what the
# server says about it), with the header $4. status, reason and $work/headers tell how it went.
fetch() {
    local from to limit header ended
    from=$1 to=$2 limit=$(($3 / 512 + 128)) header=${4:-} ended=0
    set --
    [ -z "$header" ] || set -- --header "$header"
    if [ "$fetcher" = curl ]; then
        [ ! -s "$to" ] || set -- "$@" --continue-at -
        status=$(
            ulimit -f "$limit"
            curl --config "$work/fetcher.conf" --silent --show-error --fail --location --max-redirs 3 --proto =http,https --connect-timeout 10 \
                --speed-limit 100 --speed-time 30 --dump-header "$work/headers" --output "$to" --write-out '%{http_code}' "$@" "$from" 2>"$work/fetch.err"
        ) || :
        # The status alone does not say that all of it came.
        case $status in 2??) [ ! -s "$work/fetch.err" ] || status=000 ;; 304 | [45]??) ;; *) status=000 ;; esac
    else
        if [ "$fetcher" = wget ]; then set -- --config="$work/fetcher.conf" -t 1 -T 30 "$@"; elif wget --help 2>&1 | grep -q -e ' -T SEC'; then set -- -T 30 "$@"; fi
        [ ! -s "$to" ] || set -- -c "$@"
        (ulimit -f "$limit" && exec wget -S -O "$to" "$@" "$from") >/dev/null 2>"$work/fetch.err" || ended=$?
        sed -n 's/^ *\([A-Za-z-]*: .*\)$/\1/p; s/^ *\(HTTP\/.*\)$/\1/p' "$work/fetch.err" >"$work/headers"
        status=$(sed -n 's/.*HTTP\/[0-9.]* \([0-9][0-9][0-9]\).*/\1/p' "$work/fetch.err" | tail -n 1)
        case $ended:$status in 0:) status=200 ;; 0:2??) ;; 0:*) status=000 ;; *:304 | *:[45]??) ;; *) status=000 ;; esac
    fi
    case $status in 2?? | 304) ;; *) reason=$(tail -n 1 "$work/fetch.err" | cut -c 1-300) && reason="$from: ${reason:-no answer}" ;; esac
}

# Copy file $1 of a share to $2, at most $3 bytes. A share may hold anything: only a regular file is opened, and not for long.
copy_file() {
    local patience
    patience='' status=000 reason="$1 is not there, or no regular file of at most $3 bytes"
    ! has timeout || patience='timeout 120'
    if [ -f "$1" ] && [ ! -L "$1" ] && [ "$(stat -c %s "$1")" -le "$3" ] && $patience head -c "$3" "$1" >"$2"; then status=200; fi
}

# Fetch the release of this node to $work/fetched. fetched is then new, unchanged, absent (there is none for this node) or offline.
fetch_release() {
    local known line header
    rm -f "$PULL"/*.new
    : >"$work/headers" && header=''
    case $url in
        /*)
            copy_file "$url/$me.release" "$work/fetched" "$RELEASE_LIMIT"
            if [ ! -d "$url" ]; then reason="$url: no such directory (is the share mounted?)"; elif [ ! -e "$url/$me.release" ]; then status=404; fi
            ;;
        *)
            # Only if it is another than the one that was applied.
            if [ -s "$PULL/release" ] && { read -r known && read -r line; } <"$PULL/validator" && [ "$known" = "$url" ]; then header=$line; fi
            fetch "$url/$me.release" "$work/fetched" "$RELEASE_LIMIT" "$header"
            ;;
    esac
    case $status in 2??) fetched=new ;; 304) fetched=unchanged ;; 404 | 410) fetched=absent ;; *) fetched=offline ;; esac
    [ "$fetched" = new ] || return 0
    awk -v url="$url" '
        BEGIN { print url }
        { sub(/\r$/, "") }
        /^HTTP\// { etag = date = "" }
        tolower($1) == "etag:" { sub(/^[^:]*: */, ""); etag = "If-None-Match: " $0 }
        tolower($1) == "last-modified:" { sub(/^[^:]*: */, ""); date = "If-Modified-Since: " $0 }
        END { print etag != "" ? etag : date }' "$work/headers" >"$work/validator"
    if cmp -s "$work/fetched" "$PULL/release"; then fetched=unchanged; fi
}

# ---------------------------------------------------------------- Apply
# Have the fetched release verified, get what it offers, apply it, remember it.
take_release() {
    local offered delta
    mkdir "$work/split"
    awk -v dir="$work/split" '
        /^-----BEGIN SSH SIGNATURE-----$/ { file = dir "/release" (n ? "." n : "") ".sig"; n++ }
        file == "" { print > (dir "/release"); next }
        n <= 99 { print > file }' "$work/fetched" || die 3 "the release cannot be kept in $PULL (is the disk full?)"
    [ -s "$work/split/release" ] || die 2 "$url/$me.release is empty, or no release"
    run_node release ${dry_run:+--dry-run} "$work/split"
    offered=$(awk -v node="$me" '$1 == "bundle" && $2 "" == node { print $3, $4; exit }' "$work/split/release")
    delta=$(awk -v node="$me" -v base="$r_generation" -v to="${offered% *}" '$1 == "delta" && $2 "" == node && $3 == base && $4 == to { print $5; exit }' "$work/split/release")
    if [ "$r_generation" = "${offered% *}" ]; then heal    # nothing new, signed anew
    # Without its base in the kernel a delta is of no use, and so the whole bundle is the second try.
    elif [ -n "$delta" ] && take_object "$delta" && [ "$changed" != full ]; then by_delta=true
    else take_object "${offered#* }" || die 2 "$reason"
    fi
    [ -z "$dry_run" ] || return 0
    { cp "$work/validator" "$PULL/validator.new" && cp "$work/fetched" "$PULL/release.new" && mv "$PULL/validator.new" "$PULL/validator" &&
        mv "$PULL/release.new" "$PULL/release"; } || die 3 "the release cannot be kept in $PULL (is the disk full?)"
    rm -f "$PULL"/part.*
}

# Fetch the archive of the bundle or delta with digest $1, and apply it. False with reason if it cannot be had.
take_object() {
    local sum size file pack
    sum=$(awk -v digest="$1" '$1 == "object" && $2 == digest && $3 ~ /^[0-9a-f]+$/ && $4 ~ /^[0-9]+$/ && length($4) < 11 { print $3, $4; exit }' "$work/split/release")
    size=${sum#* } sum=${sum% *} reason="the release does not say where $1 is"
    [ ${#sum} -eq 64 ] || return 1
    setting limit 268435456
    [ "$size" -le "$reply" ] || die 2 "what is offered has $size bytes, more than $reply ($ETC/node.conf: limit)"
    for file in "$PULL"/part.*; do [ "$file" = "$PULL/part.$sum" ] || rm -f "$file"; done
    get_part "$url/objects/$sum" "$PULL/part.$sum" "$sum" "$size" || return 1
    # The release goes before the archive, in the form that the archive has: text, or gzip, which may have two members.
    if [ "$(head -c 2 "$PULL/part.$sum" | tr -d '\000')" = == ]; then pack='cat'; else pack='gzip -1c'; fi
    { for file in "$work/split"/*; do printf '== %s %d\n' "${file##*/}" "$(wc -l <"$file")" && cat "$file"; done | $pack && cat "$PULL/part.$sum"; } >"$work/stream" ||
        die 3 "the bundle cannot be kept in $PULL (is the disk full?)"
    run_node "$([ -z "$dry_run" ] && echo apply || echo check)" --node "$me" - <"$work/stream"
    case $reply in *'"need": "full"'*) changed=full ;; *'"changed": true'*) changed=true ;; *) changed=false ;; esac
}

# Get $1 into $2, which then has the sum $3 and the size $4. A part that was resumed may be of something else; then once more from
# the start. False with reason.
get_part() {
    local had now
    while :; do
        ! is_sum "$2" "$3" || return 0
        had=$(size_of "$2")
        if [ "$had" -ge "$4" ]; then rm -f "$2" && had=0; fi
        case $url in /*) had=0 && copy_file "$1" "$2" "$4" ;; *) fetch "$1" "$2" "$4" ;; esac
        now=$(size_of "$2")
        bytes=$((bytes + now - had))
        ! is_sum "$2" "$3" || return 0
        # Cut short without having been resumed: the next pull goes on where this one ended.
        if [ "$had" = 0 ] && [ "$now" -lt "$4" ] && [ "$status" = 000 ]; then return 1; fi
        rm -f "$2"
        [ "$had" != 0 ] || break
    done
    case $status in 2??) reason="$1: what came is not what the release names (tampered with, or cut short)" ;; esac
    return 1
}

size_of() { if [ -f "$1" ]; then echo $(($(wc -c <"$1"))); else echo 0; fi; }
is_sum() { [ -f "$1" ] && [ "$(sha256sum <"$1")" = "$2  -" ]; }

# A node without news still has what was applied, or gets it back.
heal() {
    local rules
    [ -n "$r_generation" ] && [ -z "$dry_run" ] || return 0
    rules=$(cat "$STATE/bundles/$r_snapshot"/*.rules "$STATE/bundles/$r_snapshot"/*.nft 2>/dev/null | wc -c)
    if [ -n "$verify" ] || [ "$rules" -le "$VERIFY_LIMIT" ]; then run_node restore --verify; else run_node restore; fi
    case $reply in *'"changed": true'*) healed=true changed=true ;; esac
}

# ---------------------------------------------------------------- Report
# include tools/put-file.sh

# Keep the answer $1, have the metrics written, and report the answer where node.conf says. What is nothing new is said once an hour,
# so that a poll without news is one request.
report() {
    local last now
    { printf '%s\n' "$1" >"$PULL/last.new" && mv "$PULL/last.new" "$PULL/last"; } 2>/dev/null || return 0
    [ ! -f "${node%/*}/akp-metrics" ] || sh "${node%/*}/akp-metrics" pull || :
    setting report
    last=0 now=$(date +%s)
    [ -n "$reply" ] || return 0
    case $1 in *'"ok": true, "changed": false, "fetched": "unchanged"'*) [ ! -r "$PULL/reported" ] || read -r last <"$PULL/reported" || : ;; esac
    [ $((now - last)) -ge 3600 ] || return 0
    case $reply in */) reply=$reply$me.json ;; esac
    if send "$reply"; then printf '%s\n' "$now" >"$PULL/reported"; else say "warning: the report could not be left where node.conf says"; fi
}

# Send $PULL/last to a file, or by HTTP PUT.
send() {
    case $1 in http://* | https://*) ;; *) put_file "$PULL/last" "${1#file://}"; return ;; esac
    [ -n "$fetcher" ] || choose_fetcher
    case $fetcher in
        curl) curl --config "$work/fetcher.conf" --silent --fail --connect-timeout 10 --max-time 30 --upload-file "$PULL/last" "$1" ;;
        wget) wget --config="$work/fetcher.conf" -q -T 30 -t 1 -O /dev/null --method=PUT --body-file="$PULL/last" "$1" ;;
        *) false ;;
    esac >/dev/null 2>&1
}

# ---------------------------------------------------------------- Main
# One pull at a time; a second one ends with 5. The state directory belongs to root alone, or 3.
begin() {
    need flock util-linux
    [ -d "$PULL" ] || mkdir -p "$PULL" 2>/dev/null || die 3 "cannot make the state directory $PULL"
    if [ -L "$STATE" ] || [ ! -O "$STATE" ] || [ -L "$PULL" ] || [ ! -O "$PULL" ]; then die 3 "the directory $STATE does not belong to root; remove it, or chown it to root"; fi
    exec 8>>"$PULL/lock"
    flock -n 8 || die 5 "locked: another pull is under way"
    trap 'leave "$?"' EXIT && trap 'exit 143' HUP INT TERM && trap '' PIPE
    read -r started _ </proc/uptime
    { rm -rf "$PULL/work" && mkdir "$PULL/work"; } || die 3 "$PULL cannot be written (is the disk full?)"
    work=$PULL/work
    read_record
}

# One poll.
pull() {
    local counter seconds
    [ -e "$ETC/allowed_signers" ] || die 2 "pull needs to know whose releases count: put their keys into $ETC/allowed_signers"
    setting url
    [ -n "$reply" ] || die 2 "$ETC/node.conf does not say where to pull from; add a line: url https://SERVER/DIRECTORY"
    url=${reply%/} url=${url#file://}
    case $url in http://* | https://* | /*) ;; *) die 2 "$ETC/node.conf: url \"$url\" is not one of http://, https://, file:/// or a path" ;; esac
    case $me in '' | .* | *[!A-Za-z0-9._-]*) die 2 "\"$me\" is no name of a node, set it in $ETC/node.conf: node NAME" ;; esac
    # The same for every poll of a node and another for each node: polls spread, and stay a period apart.
    [ "$jitter" -eq 0 ] || sleep "$(printf '%s' "$me" | cksum | awk -v range="$jitter" '{ print $1 % (range + 1) }')"
    begin
    case $url in /*) ;; *) choose_fetcher ;; esac
    fetch_release
    if [ "$fetched" = new ]; then take_release; else heal; fi
    case $fetched in
        offline | absent) warn "nothing could be pulled, this node keeps what it has: $reason" ;;
        unchanged) awk -v now="$(date +%s)" '$1 == "expires" { exit $2 + 0 <= now + 0 }' "$PULL/release" ||
            warn "the release that this node has expired: no new one is published (or is the clock of this host wrong?)" ;;
    esac
    counter=null
    [ ! -r "$STATE/counter" ] || read -r counter <"$STATE/counter" || :
    seconds=$(awk -v started="$started" '{ printf "%.2f", $1 - started }' /proc/uptime)
    finish 0 "{\"verb\": \"pull\", \"ok\": true, \"changed\": $changed, \"fetched\": \"$fetched\", \"node\": \"$me\", \"generation\": $([ -z "$r_generation" ] && echo null || echo "\"$r_generation\""), \
\"counter\": $counter, \"delta\": $by_delta, \"healed\": $healed, \"bytes\": $bytes, \"seconds\": $seconds, \"warnings\": [$warnings]}"
}

while [ $# -gt 0 ]; do
    case $1 in
        --verify) verify=1 ;; --dry-run) dry_run=1 ;;
        --jitter) jitter=${2:-x}; [ $# -lt 2 ] || shift ;;
        *) die 2 "usage: akp-pull [--jitter S] [--verify] [--dry-run]" ;;
    esac
    shift
done
case $jitter in '' | *[!0-9]* | ??????*) die 2 "--jitter takes a number of seconds up to 99999, not \"$jitter\"" ;; esac
[ "$(id -u)" = 0 ] || die 3 "pull needs root"
case $0 in */*) node=${AKP_NODE_PROGRAM:-${0%/*}/akp-node} ;; *) node=${AKP_NODE_PROGRAM:-./akp-node} ;; esac
[ -f "$node" ] || die 2 "akp-node is not at $node: install it beside akp-pull"
setting node "$(uname -n | tr '[:upper:]' '[:lower:]')"
me=$reply
pull
