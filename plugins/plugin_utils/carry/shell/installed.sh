# shellcheck shell=sh disable=SC2154
# Ends an installation. Set before: list, what the steps changed; dry; follow, shell that is run if they did.
if [ -n "$list" ] && [ -z "$dry" ]; then
  eval "$follow" >"$d/out" 2>&1 </dev/null || {
    said=$(tr -c 'A-Za-z0-9 ._:/,=+-' ' ' <"$d/out" | tail -c 500)
    echo "{\"ok\": false, \"error\": \"the files are there, but what should follow failed: $said\"}"
    exit 4
  }
fi
echo "{\"ok\": true, \"files\": [$list]}"
