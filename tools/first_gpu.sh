#!/usr/bin/env bash
# Run all checks and benchmarks that need a GPU, on the first machine with one; no network needed.
#
#   tools/first_gpu.sh [--rehearse] [FOLDER]
#
# The parts run in sequence, and a failed part does not stop the others. FOLDER (default: first-gpu)
# gets their logs, results and report.md; the exit code is 0 if every part passed. --rehearse runs
# small versions of the parts that work on a CPU.
set -uo pipefail
cd "$(dirname "$0")/.."

rehearse=
if [ "${1:-}" = --rehearse ]; then rehearse=1; shift; fi
folder=${1:-first-gpu}
if [ -e "$folder" ]; then
    echo "first_gpu.sh: $folder exists; name another folder" >&2
    exit 2
fi
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
report=$folder/report.md
failed=0

# part NAME COMMAND...: run it, keep its output, continue after a failure
part() {
    local name=$1 started=$SECONDS result=passed
    shift
    echo "== $name: $*"
    "$@" >"$folder/$name.log" 2>&1 || result="**failed** ($?)"
    [ "$result" = passed ] || failed=1
    echo "   ${result//\*/}, $((SECONDS - started)) s"
    echo "| $name | $result | $((SECONDS - started)) | \`$*\` |" >>"$report"
}

# random weights in the shape of a 0.5B model, with the quickstart's tokenizer
make_model() {
    python - "$folder/model" "${rehearse:+small}" <<'PYTHON'
import json, shutil, sys
from pathlib import Path

folder, is_small = Path(sys.argv[1]), bool(sys.argv[2])
shutil.copytree("configs/quickstart-base", folder, ignore=shutil.ignore_patterns("*.safetensors"))
config = json.loads((folder / "config.json").read_text())
config["dtype"] = "bfloat16"
if not is_small:
    config |= dict(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, layer_types=["full_attention"] * 24,
    )
(folder / "config.json").write_text(json.dumps(config, indent=2))
PYTHON
}

# train_bf16 NAME ARGUMENTS...: random weights are never correct, so train on every group; log-probs,
# weight updates, sleep and wake are the same as in any run
train_bf16() {
    local name=$1 memory=
    shift
    if [ -z "$rehearse" ]; then
        nvidia-smi --query-gpu=timestamp,index,memory.used --format=csv -lms 200 \
            >"$folder/$name.memory.csv" &
        memory=$!
    fi
    megadapo train configs/quickstart.toml "${bf16[@]}" --run.folder="$folder/$name" \
        "${short[@]}" --checkpoint.every="$steps" "$@"
    local code=$?
    [ -z "$memory" ] || kill "$memory"
    return $code
}

{
    echo "# First GPU: $(date -u +%Y-%m-%d)${rehearse:+, rehearsed on a CPU}"
    echo
    echo "| part | result | seconds | command |"
    echo "| --- | --- | ---: | --- |"
} >"$report"

bf16=(--model.path="$folder/model" --model.init=random --model.dtype=bfloat16
    --sampling.selection=all --oracles.logprob_abs_max=1.0)
if [ -n "$rehearse" ]; then
    steps=2
    head=(--device cpu --shape 256,128,1024,float32 --repeats 2)
    tests=(--collect-only)
    plan=(configs/qwen2.5-7b.toml)
    memory=()
    # an engine on a CPU cannot quantize
    fp8=(megadapo plan configs/quickstart.toml "${bf16[@]}" --cluster.device=cuda)
else
    steps=5
    head=(--device cuda)
    tests=()
    plan=(configs/quickstart.toml "${bf16[@]}" --cluster.device=cuda)
    memory=(--memory "$folder/memory")
    fp8=(train_bf16 fp8)
fi
offload=('--trainer.offload=["optimizer", "gradients", "parameters"]')

# also one engine in a rehearsal
short=(--rollout.num_engines=1 --run.num_steps="$steps" --trainer.optimizer.warmup_steps=1 --evaluation.every=0)

part doctor megadapo doctor
part kernels megadapo profile --arch 90
part tests python -m pytest -q -m gpu "${tests[@]}" tests/gpu
part head megadapo bench head "${head[@]}" --json "$folder/head.json"
part quickstart megadapo train configs/quickstart.toml --run.folder="$folder/quickstart" \
    "${short[@]}"
part model make_model
part plan megadapo plan "${plan[@]}"
part bf16 train_bf16 bf16
part offload train_bf16 offload "${offload[@]}"
part fp8 "${fp8[@]}" --rollout.quantization=fp8 --algorithm.importance.scope=all
part profile megadapo profile --step configs/quickstart.toml "${bf16[@]}" --steps 2 \
    --rollout.num_engines=1 --trace "$folder/trace.json.gz" "${memory[@]}"

{
    for name in bf16 offload fp8; do
        echo
        echo "## $name: what each step measured"
        echo
        echo '```'
        [ ! -e "$folder/$name/metrics.jsonl" ] || python - "$folder/$name/metrics.jsonl" <<'PYTHON'
import json, sys

words = ("step", "ratio", "time/")
for line in open(sys.argv[1], encoding="utf-8"):
    record = json.loads(line)
    print({name: value for name, value in record.items() if name.startswith(words) or "logprob" in name})
PYTHON
        # peak memory of each GPU
        [ ! -s "$folder/$name.memory.csv" ] || awk -F', ' '
            NR > 1 && $3 + 0 > most[$2] { most[$2] = $3 + 0 }
            END { for (gpu in most) print "GPU " gpu ": at most " most[gpu] " MiB in use" }
            ' "$folder/$name.memory.csv"
        echo '```'
    done
    for log in "$folder"/*.log; do
        echo
        echo "## $(basename "$log")"
        echo
        echo '```'
        tail -n 60 "$log"
        echo '```'
    done
} >>"$report" 2>&1

echo "$report"
exit $failed
