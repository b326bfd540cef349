#!/usr/bin/env bash
# Run on the nodes of one Slurm job: Ray with a token on every node, then the driver on the first.
#
#   sbatch --nodes=16 tools/launch/slurm.sh configs/qwen2.5-32b.toml \
#       --model.path=/shared/models/Qwen2.5-32B --run.folder=/shared/runs/32b
#
# `megadapo train` gets the script's arguments. The home folder, the model and run.folder must be on
# storage that all nodes share. Variables in the environment of sbatch:
#
#   MEGADAPO_IMAGE    image of a container (pyxis: srun --container-image); default: programs on PATH
#   MEGADAPO_MOUNTS   mounts besides ~/.ray, such as /shared:/shared,/models:/models
#   MEGADAPO_HEAD     the first node's address in the private network; default: from its name
#   MEGADAPO_PORT     Ray's port on that node (6379)
#   MEGADAPO_REQUEUE  1: queue a stopped and saved run again, which resumes it
#
# Ten minutes before the time limit only the driver gets SIGTERM: it saves the run and ends. To save
# and stop a run at any time: scancel --batch --signal=TERM JOB
#SBATCH --job-name=megadapo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:TERM@600
#SBATCH --output=megadapo-%j.log
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "slurm.sh: name a recipe, as for megadapo train" >&2
    exit 2
fi
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes[0]}
port=${MEGADAPO_PORT:-6379}
token=$HOME/.ray/auth_token
# with Ray's default of 15 its processes get only what other programs of a node leave
export RAY_AUTH_MODE=token RAY_worker_niceness=0

container=()
if [ -n "${MEGADAPO_IMAGE:-}" ]; then
    mounts=$HOME/.ray:$HOME/.ray${MEGADAPO_MOUNTS:+,$MEGADAPO_MOUNTS}
    container=(--container-image="$MEGADAPO_IMAGE" --container-mounts="$mounts")
fi

# on NODES COMMAND...: run one process on each node, with all resources of the job there.
# It replaces its shell: call it as (on ...), or as on ... &, so that $! is the process of srun.
on() {
    local list=$1 commas
    shift
    commas=${list//[!,]/}
    exec srun --overlap --cpu-bind=none --nodelist="$list" --nodes=$((${#commas} + 1)) \
        --ntasks-per-node=1 "${container[@]}" "$@"
}

(umask 077 && mkdir -p "$HOME/.ray")
if [ ! -s "$token" ]; then
    # the home folder in a container is different
    (on "$first" env HOME="$HOME" ray get-auth-token --generate) >/dev/null
fi
chmod 600 "$token"
export RAY_AUTH_TOKEN_PATH=$token

address=${MEGADAPO_HEAD:-$(on "$first" hostname --ip-address)}
address=${address%% *}
# end Ray at any end of the script
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
on "$first" ray start --head --node-ip-address="$address" --port="$port" --include-dashboard=false --block &
for _ in {1..60}; do
    if (on "$first" ray status --address="$address:$port") >/dev/null 2>&1; then break; fi
    sleep 2
done
if [ ${#nodes[@]} -gt 1 ]; then
    rest=$(IFS=, && echo "${nodes[*]:1}")
    on "$rest" ray start --address="$address:$port" --block &
fi

# the driver waits for all GPUs of the recipe: cluster.start_timeout_s
on "$first" env RAY_ADDRESS="$address:$port" megadapo train "$@" --cluster.address=auto &
driver=$!
# srun forwards the signal to the driver
trap 'kill -TERM $driver' TERM INT
code=0
wait "$driver" || code=$?
# a signal ends the wait, but not the driver
while kill -0 "$driver" 2>/dev/null; do
    code=0
    wait "$driver" || code=$?
done
if [ "$code" -eq 75 ] && [ "${MEGADAPO_REQUEUE:-0}" = 1 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
