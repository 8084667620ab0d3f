# shellcheck shell=sh disable=SC2154
# What the steps of an installation use. Set before: d, what unpack.sh made; etc, the directory of settings; dry, nothing
# unless this is a rehearsal.
list=
note() { list="$list${list:+, }\"$1\""; }
# put FILE PATH MODE: a file of $d there, unless it is there already.
put() {
  if cmp -s "$d/$1" "$2" && [ -n "$(find "$2" -prune -perm "$3" -user 0)" ]; then return 0; fi
  note "$2"
  [ -z "$dry" ] || return 0
  (umask 022 && mkdir -p "${2%/*}")
  cp "$d/$1" "$2.akp-new"
  chown 0:0 "$2.akp-new"
  chmod "$3" "$2.akp-new"
  mv "$2.akp-new" "$2"
}
# drop PATH: no such file, and no directory of settings that is empty.
drop() {
  if [ ! -e "$1" ] && [ ! -L "$1" ]; then return 0; fi
  note "$1"
  [ -z "$dry" ] || return 0
  rm -f "$1"
  if [ "${1%/*}" = "$etc" ]; then rmdir "$etc" 2>/dev/null || :; fi
}
# settle FILE PATH: the settings of a file of $d in the other, whose other lines stay.
settle() {
  [ -e "$2" ] || [ -s "$d/$1" ] || return 0
  if [ -e "$2" ]; then cat "$2"; fi | awk -v wanted="$d/$1" '
    function say(key) { if (!done[key]++ && value[key] != key) print value[key] }
    BEGIN {
      while ((getline line < wanted) > 0) { key = line; sub(/ .*/, "", key); order[++n] = key; value[key] = line }
    }
    $1 in value { say($1); next }
    { print }
    END { for (i = 1; i <= n; i++) say(order[i]) }' >"$d/settled"
  if [ -s "$d/settled" ]; then put settled "$2" 0644; else drop "$2"; fi
}
