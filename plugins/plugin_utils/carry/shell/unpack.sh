# shellcheck shell=sh disable=SC2154
# Takes the archive on stdin apart, into the directory $d. Set before: broken, what is answered if it was cut short.
# `akp-node apply -` reads the same archive; here the program itself has to be taken out of it first.
set -eu
umask 077
mkdir -p /run/akp
d=$(mktemp -d /run/akp/carry.XXXXXX)
trap 'rm -rf "$d"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
gzip -dc | awk -v d="$d" '
  left > 0 { print > f; if (!--left) close(f); next }
  /^== [A-Za-z0-9_][A-Za-z0-9._-]* [0-9]+$/ { f = d "/" $2; left = $3 + 0; printf "" > f; if (!left) close(f); next }
  /^==$/ { whole = 1; exit }
  { exit }
  END { exit !whole }' || {
  echo "$broken"
  exit 2
}
