# shellcheck shell=sh disable=SC2015,SC2034,SC2086,SC2154,SC3043
# ---------------------------------------------------------------- Bundle
# Copy the bundle in directory $1, or on stdin for -, to a private directory, and check digests, signatures, node, and the shape of
# every line. Sets bundle, dirs and b_*. What was checked is what is used.
open_bundle() {
    bundle=$work/in
    if [ "$1" = - ]; then take_stream; else take_directory "$1"; fi
    verify "$bundle" || die 2 "$refused"
    dirs=$bundle
    setting node
    for reply in $reply $node_wanted; do [ "$b_node" = "$reply" ] || die 2 "the bundle is for node \"$b_node\", this is \"$reply\""; done
    [ "$b_mode" = "$MODES" ] || die 2 "the bundle is of mode $b_mode, this program of mode $MODES (see akp program --mode $b_mode)"
    check_release
    # The snapshot in force was looked at when it came.
    [ "$b_digest" = "$r_snapshot" ] || guard "$bundle"
}

# A bundle that will be recorded is taken on the disk of the record, where it needs no second copy.
take_on_disk() {
    [ "$verb" != check ] || return 0
    own_directory "$STATE"
    bundle=$STATE/in.$$
    mkdir "$bundle" || die 3 "$bundle cannot be made $FULL"
}

# Copy the files that the manifest of directory $1 lists, and a release with its signatures.
take_directory() {
    local dir name
    dir=$1
    [ -d "$dir" ] || die 2 "no such bundle directory: $dir"
    manifest "$dir" || die 2 "$dir: $refused"
    take_on_disk
    set -- "$dir/manifest.json"
    for name in $b_names; do
        [ -f "$dir/$name" ] || die 2 "$name: listed in the manifest but not there"
        set -- "$@" "$dir/$name"
    done
    for name in "$dir/release" "$dir/release.sig" "$dir"/release.[0-9].sig "$dir"/release.[0-9][0-9].sig; do
        [ ! -f "$name" ] || set -- "$@" "$name"
    done
    cp "$@" "$bundle/" || die 3 "$dir: a file cannot be copied $FULL"
}

# Unpack the bundle on stdin. Where signers are pinned, only its head is unpacked before the signatures are checked: what is not
# signed cannot fill a disk. What is not compressed is small, and fits beside the work files.
take_stream() {
    local packed
    packed=''
    case $MAX_BUNDLE in '' | *[!0-9]* | ????*) die 2 "AKP_MAX_BUNDLE is a number of megabytes, not \"$MAX_BUNDLE\"" ;; esac
    head -c $((MAX_STREAM + 1)) >"$work/stream" || die 3 "what came on stdin cannot be kept in $RUN (is it full?)"
    if signed_only; then
        unpack head 12000000
        manifest "$bundle" || die 2 "$refused"
        reply=$(sha256sum <"$bundle/manifest.json") || die 3 "sha256sum failed"
        b_digest=${reply%% *}
        check_release
    fi
    unpack all "${MAX_BUNDLE}000000"
}

# Unpack the head or all of the stream, at most $2 bytes. For take_stream, which keeps in packed whether it is compressed.
unpack() {
    refused=packed
    [ -n "$packed" ] || refused=$(unpack_into "$@" plain <"$work/stream") || die 3 "the bundle cannot be unpacked in $RUN (is it full?)"
    if [ "$refused" = packed ]; then
        [ -n "$packed" ] || { need gzip gzip; take_on_disk; packed=1; }
        refused=$(gzip -dc <"$work/stream" 2>/dev/null | head -c "$2" | unpack_into "$@" '') || die 3 "the bundle cannot be unpacked in $STATE $FULL"
    fi
    [ -z "$refused" ] || die 2 "what came on stdin $refused"
}
unpack_into() { awk -v dir="$bundle" -v what="$1" -v limit="$2" -v plain="$3" "$unpack_awk"; }

# Read the manifest of directory $1 into b_*. False with refused if it is none. Only characters pass that are safe in a shell.
manifest() {
    local line key value inside api
    b_kind='' b_base='' b_mode='' b_node='' b_generation='' b_ports=0 b_endpoints=0 b_names='' b_sums='' inside='' api=''
    refused="no manifest.json"
    [ -f "$1/manifest.json" ] || return 1
    while IFS= read -r line; do
        refused="manifest.json: not a line of a manifest: $line"
        # One block of files, last; another reader of this text must not see other files than this one.
        case $inside$line in
            '{' | '  "files": {}' | 'end}') continue ;;
            '  "files": {') inside='file'; continue ;;
            'file  }' | '}') inside=end; continue ;;
            '  "'*'": '* | 'file    "'*'": "'*) ;;
            *) return 1 ;;
        esac
        key=${line#*\"} value=${line#*\": } value=${value%,} value=${value#\"} value=${value%\"} key=${key%%\"*}
        case $key$value in *[!A-Za-z0-9._/\ :-]* | *..*) return 1 ;; esac
        case $inside/$key/$value in
            file/[!A-Za-z0-9_]* | file/*[!A-Za-z0-9._-]*/* | file/manifest.json/* | file/release* | file/log/*) return 1 ;;
            file/*)
                ! has_file "$key" || { refused="manifest.json: $key is listed twice"; return 1; }
                is_hex64 "${value% *}" && is_number "${value#* }" || return 1
                b_names="$b_names$key " b_sums="$b_sums$NL${value% *}  $key"
                ;;
            /apiVersion/*) api=$value ;;
            /kind/Bundle | /kind/Delta | /mode/iptables | /mode/ipvs | /mode/nftables | /mode/userspace | /node/*) eval "b_$key=\$value" ;;
            /base/* | /generation/*) is_hex64 "$value" && eval "b_$key=\$value" || return 1 ;;
            /servicePorts/*) is_number "$value" && b_ports=$value || return 1 ;;
            /endpoints/*) is_number "$value" && b_endpoints=$value || return 1 ;;
            /kind/* | /mode/*) return 1 ;;
        esac
    done <"$1/manifest.json"
    refused="manifest.json: apiVersion \"$api\" is not known, this program reads akp/v2"
    [ "$api" = akp/v2 ] || return 1
    refused="manifest.json: kind, mode, base or generation is missing"
    [ -n "$b_mode" ] && [ -n "$b_generation" ] && case $b_kind$b_base in Bundle | Delta?*) ;; *) return 1 ;; esac
}

is_hex64() {
    case $1 in *[!0-9a-f]*) return 1 ;; esac
    [ ${#1} -eq 64 ]
}
is_number() { case $1 in 0) ;; '' | 0* | *[!0-9]* | ??????????*) return 1 ;; esac; }

# True if the files of directory $1 are those of its manifest and no others, byte for byte. Sets b_*; b_digest is the manifest's.
verify() {
    local sums line
    manifest "$1" || return 1
    for line in "$1"/*; do
        line=${line##*/}
        case " $b_names manifest.json log release " in *" $line "*) continue ;; esac
        refused="$line: not listed in the manifest"
        case $line in release.sig | release.[0-9].sig | release.[0-9][0-9].sig) ;; *) return 1 ;; esac
    done
    refused="a file that the manifest lists is not there or cannot be read"
    sums=$(cd "$1" && sha256sum manifest.json $b_names 2>/dev/null) || return 1
    b_digest=${sums%% *}
    case $sums in "$b_digest  manifest.json$b_sums") return 0 ;; esac
    while read -r line; do
        case "$b_sums$NL" in *"$NL$line$NL"*) ;; *) refused="${line##* }: the digest does not match the manifest" ;; esac
    done <<END
${sums#*"$NL"}
END
    return 1
}

# True if the bundle that is wanted lists a file.
has_file() { case " $b_names" in *" $1 "*) return 0 ;; esac; return 1; }

# reply is the path of a file in the last of the directories $dirs that has it; empty if none has.
effective() {
    local dir
    reply=''
    for dir in $dirs; do [ ! -f "$dir/$1" ] || reply=$dir/$1; done
}

# ---------------------------------------------------------------- Guard
# A bundle may only do what kube-proxy does, however it was made and signed: every line of every file of directory $1, whose manifest is in
# b_*, fits a shape; else 2, naming file, line and reason.
guard() {
    local shapes checks names sizes ports proxies vips why
    checks='function restore() { }'
    "${b_mode}_shapes"
    names=${b_names%akp-node } names="/dev/null ${names%akp-leave }"
    setting accept_ports; ports=$reply
    setting proxy_ports; proxies=$reply
    setting vip_ranges; vips=$reply
    setting endpoint_ranges
    # The real lines and bytes, not what the manifest claims.
    sizes=$(cd "$1" && wc -lc $names) || die 3 "the files of the bundle cannot be read"
    why=$(cd "$1" && SHAPES="$settings_shapes$shapes" SIZES="$sizes" ACCEPT_PORTS="$ports" PROXY_PORTS="$proxies" VIP_RANGES="$vips" ENDPOINT_RANGES="$reply" \
        awk "$addresses_awk$guard_types_awk$guard_shapes_awk$checks$guard_awk" kind="$b_kind" gen="$b_generation" base="$b_base" $names) ||
        die 2 "${why:-the bundle cannot be checked}"
}
