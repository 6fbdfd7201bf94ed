#!/usr/bin/env bash
# Two "hosts" on one Linux machine, and one job over both.
#
#     host-a 10.77.0.1 ─── veth ─── 10.77.0.2 host-b
#
# Each is a network namespace with an interface of its own and no other way out. torchrun runs in
# each, and they find each other by a c10d rendezvous on host-a. The namespaces are made inside
# namespaces of this script's own, so the machine's network is not touched, and they are gone when
# the script ends, however it ends. Needs root, or a kernel that lets users make namespaces.
#
#     examples/multi_node/run.sh [arguments of train.py]
#     NPROC=1 examples/multi_node/run.sh       # one process per host: the stages talk over the wire
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
nproc=${NPROC:-2}

if [ -z "${PLACER_INSIDE:-}" ]; then
    user=()
    [ "$(id -u)" = 0 ] || user=(--user --map-root-user)
    exec unshare "${user[@]}" --net --mount env PLACER_INSIDE=1 bash "$0" "$@"
fi

mount -t tmpfs tmpfs /run # `ip netns` keeps its names there
ip netns add host-a
ip netns add host-b
ip link add eth-a netns host-a type veth peer name eth-b netns host-b
for host in a b; do
    ip -n "host-$host" address add "10.77.0.$([ $host = a ] && echo 1 || echo 2)/24" dev "eth-$host"
    ip -n "host-$host" link set lo up
    ip -n "host-$host" link set "eth-$host" up
done

# What is started on each host; only its own name and address differ. torchrun tells by the host
# name whether it is at the endpoint; both have the same here, so it is told by is_host.
start() {
    local host=$1 address=$2 is_host=$3
    shift 3
    ip netns exec "host-$host" env \
        HOST_LABEL="host-$host" \
        GLOO_SOCKET_IFNAME="eth-$host" NCCL_SOCKET_IFNAME="eth-$host" \
        OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
        TORCH_CPP_LOG_LEVEL=ERROR \
        PYTHONPATH="$here/../..:${PYTHONPATH:-}" \
        "$python" -m torch.distributed.run \
        --nnodes 2 --nproc-per-node "$nproc" --max-restarts 1 \
        --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-id demo \
        --rdzv-conf "is_host=$is_host,join_timeout=300,read_timeout=300" --local-addr "$address" \
        "$here/train.py" "$@"
}

start a 10.77.0.1 true "$@" &
first=$!
sleep "${LATE:-1}" # hosts need not start together
start b 10.77.0.2 false "$@" &
second=$!
status=0
wait $first || status=$?
wait $second || status=$?

sent() { ip netns exec "host-$1" cat "/sys/class/net/eth-$1/statistics/tx_bytes"; }
echo "sent over the wire: host-a $(sent a) bytes, host-b $(sent b) bytes"
exit $status
