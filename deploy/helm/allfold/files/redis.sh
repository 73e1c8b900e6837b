# Start this pod's Redis: the primary or a replica, as the Sentinel of this pod has it.
#
#   HOST           the name under which the others reach this pod
#   REDISCLI_AUTH  the password, the same everywhere
#   MAX_MEMORY     e.g. 192mb
#   LISTEN         an address to bind to, by default all
set -eu

primary() {
    timeout 5 redis-cli -h "$HOST" -p 26379 sentinel get-master-addr-by-name allfold | head -n 1
}

tries=0
until host=$(primary) && [ -n "$host" ]; do
    tries=$((tries + 1))
    if [ $tries -gt 60 ]; then
        echo "redis: the Sentinel of this pod, $HOST:26379, does not say which one is primary" >&2
        exit 1
    fi
    sleep 1
done

# Of two that take themselves for the primary, the one without replicas takes no writes.
set -- --dir "${DATA:-/data}" --save "" --appendonly yes \
    --requirepass "$REDISCLI_AUTH" --masterauth "$REDISCLI_AUTH" \
    --maxmemory "$MAX_MEMORY" --maxmemory-policy noeviction \
    --min-replicas-to-write 1 --min-replicas-max-lag 10 --replica-announce-ip "$HOST"
[ -z "${LISTEN:-}" ] || set -- "$@" --bind "$LISTEN"
[ "$host" = "$HOST" ] || set -- "$@" --replicaof "$host" 6379
exec redis-server "$@"
