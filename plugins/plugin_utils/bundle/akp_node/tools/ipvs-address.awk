# The address of "ADDRESS:PORT" or "[ADDRESS]:PORT", and its bits. addresses.awk stands before.
function address_of(server) { sub(/:[0-9]+$/, "", server); gsub(/[][]/, "", server); return server }
function bits_of(server) { server = address_of(server); fam = server ~ /:/ ? 6 : 4; return bits(server) }
