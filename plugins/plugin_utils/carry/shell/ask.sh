# shellcheck shell=sh disable=SC2154
# Runs the program that the host has, with "$@". Set before: installed, where it may be; kept, a pattern for the copies
# that programs leave (each when it applies a state of its mode; what another mode recorded, that copy tells); digests.
# The digest of a copy lies beside it, so that no process has to be started to find it.
# shellcheck disable=SC2086
for f in "$installed" "$AKP_STATE/akp-node."$kept; do
  [ -f "$f" ] || continue
  { read -r sum <"$f.sum"; } 2>/dev/null || sum=$(sha256sum <"$f") || continue
  case " $digests " in *" ${sum%% *} "*) exec sh "$f" "$@" ;; esac
done
cat >/dev/null
echo '{"ok": false, "need": "program"}'
