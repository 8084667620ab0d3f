# shellcheck shell=sh disable=SC2154
# Removes the installed program. Set before: installed, where it is; dry, nothing unless this is a rehearsal.
removed=false
if [ -e "$installed" ]; then
  [ -n "$dry" ] || rm -f "$installed" "${installed%/*}/akp-leave"
  removed=true
fi
echo "{\"ok\": true, \"removed\": $removed}"
