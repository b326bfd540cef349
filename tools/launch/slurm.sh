#!/usr/bin/env bash
# Run on the nodes of one Slurm job: Ray with a token on every node, then the driver on the first.
#
#   sbatch --nodes=16 tools/launch/slurm.sh configs/qwen2.5-32b.toml --restarts=20 \
#       --give-up-after=1h --model.path=/shared/models/Qwen2.5-32B --run.folder=/shared/runs/32b
#
# `megadapo train` gets the script's arguments, among which --run.folder is needed. The home folder,
# the model and run.folder must be on storage that all nodes share. Variables in the environment of
# sbatch:
#
#   MEGADAPO_IMAGE         image of a container (pyxis: srun --container-image); default: programs on
#                          PATH
#   MEGADAPO_MOUNTS        mounts besides ~/.ray, such as /shared:/shared,/models:/models
#   MEGADAPO_HEAD          the first node's address in the private network; default: from its name
#   MEGADAPO_PORT          Ray's port on that node (6379)
#   MEGADAPO_SPARES        number of nodes without which the run can start (0), as when the job has
#                          more nodes than the recipe, or with --allow-fewer
#   MEGADAPO_MAX_REQUEUES  times in a row that the job is queued again without a new checkpoint (5)
#   MEGADAPO_CLOUD         aws or google: stop the run when the cloud announces the end of a node
#
# The job is queued again, and resumes the run, when Slurm loses one of its nodes, after a failure
# that a restart can fix, and at the time limit. Ten minutes before the limit the script gets
# SIGUSR1, and the driver saves the run and ends. Before anything starts, each node is checked with
# `megadapo doctor --node`. Nodes that fail are left out; with more of them than spares, the job is
# queued again without them. To save and stop a run for good: scancel --batch --signal=TERM JOB
#SBATCH --job-name=megadapo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=megadapo-%j.log
set -euo pipefail

say() { echo "slurm.sh: $*" >&2; }

run=
for word in "$@"; do
    if [[ $word == --run.folder=* ]]; then run=${word#*=}; fi
done
if [ $# -eq 0 ] || [ -z "$run" ]; then
    say "name a recipe, as for megadapo train, and --run.folder=FOLDER on storage of all nodes"
    exit 2
fi
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
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

newest_checkpoint() {
    local name
    name=$(find "$run/checkpoints" -maxdepth 1 -name 'step-*' -printf '%f\n' 2>/dev/null |
        sort -V | tail -n 1) || true
    echo "${name:-none}"
}

# The file has the newest checkpoint at the last start, and how often in a row Slurm has repeated a
# start without a later one. It is written at starts: a job that loses a node ends without notice.
max=${MEGADAPO_MAX_REQUEUES:-5}
saved=$(newest_checkpoint)
counted='' count=0
read -r counted count 2>/dev/null <"$run/slurm-requeues" || true
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ "$counted" = "$saved" ]; then
    count=$((count + 1))
else
    count=0
fi
limit="$max times without a new checkpoint (MEGADAPO_MAX_REQUEUES)"
if [ "$count" -gt "$max" ]; then
    say "not started: queued again $limit"
    exit 5
fi
(umask 077 && mkdir -p "$run")
echo "$saved $count" >"$run/slurm-requeues"

# requeue WHY [NODE...]: queue the job again, without these nodes
requeue() {
    local why=$1 excluded
    shift
    if [ "$count" -ge "$max" ] && [ "$(newest_checkpoint)" = "$saved" ]; then
        say "$why; not queued again: it was, $limit"
        return
    fi
    say "$why; queued again"
    excluded=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=\([^ (]*\).*/\1/p')
    # Slurm ends the processes of a job that it queues again, and changes pending jobs only
    trap '' TERM
    scontrol requeue "$SLURM_JOB_ID"
    if [ $# -gt 0 ]; then
        excluded=$(IFS=, && echo "$*")${excluded:+,$excluded}
        scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$excluded"
    fi
}

# end Ray and the checks at any end of the script
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
trap 'exit 75' TERM INT USR1
checks=()
for node in "${nodes[@]}"; do
    on "$node" timeout -k 10 400 \
        megadapo doctor --node ${SLURM_GPUS_ON_NODE:+"$SLURM_GPUS_ON_NODE"} &
    checks+=($!)
done
healthy=() sick=()
for i in "${!nodes[@]}"; do
    if wait "${checks[i]}"; then healthy+=("${nodes[i]}"); else sick+=("${nodes[i]}"); fi
done
if [ ${#healthy[@]} -eq 0 ]; then
    say "every node fails megadapo doctor --node, so none is excluded"
    exit 5
fi
if [ ${#sick[@]} -gt "${MEGADAPO_SPARES:-0}" ]; then
    requeue "these nodes fail megadapo doctor --node: ${sick[*]}" "${sick[@]}"
    exit 5
fi
nodes=("${healthy[@]}")
first=${nodes[0]}

(umask 077 && mkdir -p "$HOME/.ray")
if [ ! -s "$token" ]; then
    # the home folder in a container is different
    (on "$first" env HOME="$HOME" ray get-auth-token --generate) >/dev/null
fi
chmod 600 "$token"
export RAY_AUTH_TOKEN_PATH=$token

address=${MEGADAPO_HEAD:-$(on "$first" hostname --ip-address)}
address=${address%% *}
on "$first" ray start --head --node-ip-address="$address" --port="$port" \
    --include-dashboard=false --block &
for _ in {1..60}; do
    if (on "$first" ray status --address="$address:$port") >/dev/null 2>&1; then break; fi
    sleep 2
done
if [ ${#nodes[@]} -gt 1 ]; then
    rest=$(IFS=, && echo "${nodes[*]:1}")
    on "$rest" ray start --address="$address:$port" --block &
fi
if [ -n "${MEGADAPO_CLOUD:-}" ]; then
    # Slurm runs a copy of this script, so its folder is elsewhere; a container may not have it
    script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
    tools=$(dirname "$script")
    (
        container=()
        on "$(IFS=, && echo "${nodes[*]}")" \
            python3 "$tools/stop_on_notice.py" "$run" --cloud "$MEGADAPO_CLOUD"
    ) &
fi

# the driver waits for all GPUs of the recipe: cluster.start_timeout_s
on "$first" env RAY_ADDRESS="$address:$port" megadapo train "$@" --cluster.address=auto &
driver=$!
stays_stopped=0
# srun forwards the signal to the driver
trap 'stays_stopped=1; kill -TERM $driver' TERM INT
trap 'kill -TERM $driver' USR1
code=0
wait "$driver" || code=$?
# a signal ends the wait, but not the driver
while kill -0 "$driver" 2>/dev/null; do
    code=0
    wait "$driver" || code=$?
done
case $code in
    0 | 2 | 3 | 4 | 6) ;; # done, or a restart cannot fix it
    75)
        if grep -qs '"stays_stopped": true' "$run/status.json"; then stays_stopped=1; fi
        if [ "$stays_stopped" = 0 ]; then requeue "the run is saved and stopped"; fi
        ;;
    *) if [ "$stays_stopped" = 0 ]; then requeue "the driver ended with exit code $code"; fi ;;
esac
exit "$code"
