# Start this pod's Sentinel. It keeps what it knows in its configuration file, over restarts; without
# one it asks the others for the primary, and if none knows, this is the beginning, and the first
# host is it.
#
#   HOST           the name under which the others reach this pod
#   HOSTS          the names of all, with blanks between
#   REDISCLI_AUTH  the password, the same everywhere
#   LISTEN         an address to bind to, by default all
set -eu
file=${DATA:-/data}/sentinel.conf

ask() {  # HOST
    timeout 3 redis-cli -h "$1" -p 26379 sentinel get-master-addr-by-name allfold 2> /dev/null |
        head -n 1
}

primary() {
    for each in $HOSTS; do
        found=$([ "$each" = "$HOST" ] || ask "$each") || continue
        case " $HOSTS " in *" $found "*) [ -z "$found" ] || { echo "$found"; return; } ;; esac
    done
    echo "${HOSTS%% *}"
}

if [ ! -s "$file" ]; then
    cat > "$file.new" << END
port 26379
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $HOST
sentinel announce-port 26379
sentinel monitor allfold $(primary) 6379 2
sentinel down-after-milliseconds allfold 5000
sentinel failover-timeout allfold 10000
END
    mv "$file.new" "$file"
fi

# The password may have changed since; Sentinel writes it down as that of the default user.
grep -v -E '^(user default|requirepass|sentinel sentinel-pass|sentinel auth-pass) ' "$file" \
    > "$file.new"
cat >> "$file.new" << END
requirepass $REDISCLI_AUTH
sentinel sentinel-pass $REDISCLI_AUTH
sentinel auth-pass allfold $REDISCLI_AUTH
END
mv "$file.new" "$file"
set -- "$file" --sentinel --dir "${DATA:-/data}"
[ -z "${LISTEN:-}" ] || set -- "$@" --bind "$LISTEN"
exec redis-server "$@"
