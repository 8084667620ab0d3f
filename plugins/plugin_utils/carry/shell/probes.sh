# shellcheck shell=sh disable=SC2016,SC2154,SC2317
# What probes from a node use. Set before each: tries.
again() { n=0; until "$@" >/dev/null 2>&1; do n=$((n + 1)); [ "$n" -lt "$tries" ] || return 1; sleep 1; done; }
fail() { printf '{"ok": false, "probe": true, "error": "%s: does not answer from the node%s"}\n' "$1" "$2"; exit 1; }
tcp() {
  if command -v nc >/dev/null 2>&1; then nc -z -w 2 "$1" "$2"
  elif command -v bash >/dev/null 2>&1; then timeout 2 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2"
  else curl -s -m 2 "telnet://$3:$2" </dev/null; case $? in 0 | 28) ;; *) return 1 ;; esac; fi
}
get() {
  if wget --version >/dev/null 2>&1; then set -- -t 1 --max-redirect=0 --content-on-error "$@"; fi
  timeout 2 wget -q --no-check-certificate "$@" # not every busybox survives -T
}
status() {
  if command -v curl >/dev/null 2>&1; then curl -s -k -m 2 -o /dev/null -w '%{http_code}' "$1"
  else get -S -O /dev/null "$1" 2>&1 | sed -n -e 's|.*HTTP/[0-9.]* \([1-5][0-9][0-9]\).*|\1|p' | head -n 1; fi
}
body() {
  if command -v curl >/dev/null 2>&1; then curl -s -k -m 2 "$1"; else get -O - "$1"; fi | head -c 65536
  echo . # or the last newlines of the body would be lost
}
web() {
  got=$(status "$1")
  case $got in [1-5]??) ;; *) return 1 ;; esac
  case " $2 " in *" $got "*) ;; '  ') case $got in [23]??) ;; *) return 1 ;; esac ;; *) return 1 ;; esac
  [ -z "$3" ] || case $(body "$1") in *"$3"*) ;; *) return 1 ;; esac
}
