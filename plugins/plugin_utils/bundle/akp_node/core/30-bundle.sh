# shellcheck shell=sh disable=SC2015,SC2034,SC2086,SC2153,SC2154,SC3043
# ---------------------------------------------------------------- Bundle
# Take the bundle in directory $1, or on stdin for -, into $bundle, and check digests, signatures, node, and the shape of every line. Sets
# dirs and b_*. All of it goes through awk: what awk is blind for, such as a null byte, does not arrive, and the digest tells.
open_bundle() {
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

# Copy the files that the manifest of directory $1 lists, and a release with its signatures.
take_directory() {
    local dir name
    dir=$1
    [ -d "$dir" ] || die 2 "no such bundle directory: $dir"
    manifest "$dir" || die 2 "$dir: $refused"
    set -- manifest.json
    for name in $b_names; do
        [ -f "$dir/$name" ] || die 2 "$name: listed in the manifest but not there"
        set -- "$@" "$name"
        : >"$bundle/$name"
    done
    for name in "$dir"/release "$dir"/release.sig "$dir"/release.[0-9].sig "$dir"/release.[0-9][0-9].sig; do
        [ ! -f "$name" ] || set -- "$@" "${name##*/}"
    done
    (cd "$dir" && awk -v to="$bundle/" 'FNR == 1 { close(file); file = to FILENAME } { print > file }' "$@") ||
        die 3 "$dir: a file cannot be copied $FULL"
}

# Unpack the bundle on stdin. Where signers are pinned, only its head before the signatures are checked: what is not signed fills no disk.
take_stream() {
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

# Unpack the head or all of the stream, which may be compressed: at most $2 bytes.
unpack() {
    local full
    full="the bundle cannot be unpacked in ${bundle%/*} $FULL"
    refused=$(unpack_into "$@" <"$work/stream") || die 3 "$full"
    if [ "$refused" = packed ]; then
        need gzip gzip
        refused=$(gzip -dc <"$work/stream" 2>/dev/null | head -c "$2" | unpack_into "$@") || die 3 "$full"
    fi
    case $refused in '') ;; packed) die 2 "what came on stdin is no bundle" ;; *) die 2 "what came on stdin $refused" ;; esac
}
unpack_into() { awk -v dir="$bundle" -v what="$1" -v limit="$2" "$unpack_awk"; }

# Read the manifest of directory $1 into b_*. False with refused if it is none. Only characters pass that a shell takes as they are.
manifest() {
    local line key value inside api
    b_kind='' b_base='' b_mode='' b_node='' b_generation='' b_ports=0 b_endpoints=0 b_names='' b_sums='' inside='' api=''
    refused="no manifest.json"
    [ -f "$1/manifest.json" ] || return 1
    while IFS= read -r line; do
        refused="manifest.json: not a line of a manifest: $line"
        # One block of files, last: another reader sees no other files.
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

# True if the files of directory $1 are those of its manifest and no others, byte for byte. Sets b_*, and b_digest, the manifest's.
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
# A bundle may only do what kube-proxy does, no matter which key signed it: every line of every file of directory $1, whose manifest is
# in b_*, fits a shape; else 2, naming file, line and reason.
guard() {
    local dir shapes checks names name why
    dir=$1 checks='function restore() { }'
    "${b_mode}_shapes"
    names=${b_names%akp-node } names="/dev/null ${names%akp-leave }"
    set --
    for name in accept_ports proxy_ports vip_ranges endpoint_ranges; do setting "$name"; set -- "$@" -v "$name=$reply"; done
    why=$(cd "$dir" && SHAPES="$settings_shapes$shapes" NAMES="$names" awk "$@" \
        "$addresses_awk$guard_types_awk$guard_shapes_awk$checks$guard_awk" kind="$b_kind" gen="$b_generation" base="$b_base" $names) ||
        die 2 "${why:-the bundle cannot be checked}"
}
