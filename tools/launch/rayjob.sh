#!/usr/bin/env bash
# Entrypoint of the RayJob in kuberay.yaml: run `megadapo train` with the script's arguments and the
# run's folder MEGADAPO_RUN.
#
# KubeRay repeats a job that fails on a new cluster, whatever its exit code. A run that no restart
# can fix leaves its exit code in MEGADAPO_RUN/rayjob-end, and the repetitions end at once.
set -euo pipefail

end=$MEGADAPO_RUN/rayjob-end
if [ -s "$end" ]; then
    code=$(<"$end")
    echo "rayjob.sh: the run has ended with exit code $code, which a repetition cannot fix." \
        "$MEGADAPO_RUN/log.txt has the reason; delete $end to start the run again" >&2
    exit "$code"
fi
code=0
megadapo train "$@" --run.folder="$MEGADAPO_RUN" --cluster.address=auto || code=$?
case $code in
    2 | 3 | 4 | 6)
        (umask 077 && mkdir -p "$MEGADAPO_RUN")
        echo "$code" >"$end"
        ;;
    75)
        echo "rayjob.sh: the run is saved, and stopped as requested" >&2
        exit 0
        ;;
esac
exit "$code"
