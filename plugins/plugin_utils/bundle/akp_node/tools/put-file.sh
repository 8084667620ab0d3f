# shellcheck shell=sh disable=SC3043
# Put file $1 at $2 for others to read. The directory may belong to another user: the new file has a random name and must not exist
# (set -C), its mode comes from the umask, and mv -T takes a name for a name, even if it is a link or a directory.
put_file() {
    local new
    read -r new </proc/sys/kernel/random/uuid
    new=${2%/*}/.akp.$new
    if (umask 022 && set -C && cat "$1" >"$new" && mv -f -T "$new" "$2") 2>/dev/null; then return 0; fi
    rm -f "$new"
    return 1
}
