#!/usr/bin/env bash
# A first-time user's tour: a small version of README and docs/first_hour.md, run in the current folder, a fresh clone.
# Each step prints its output and checks it; the first error ends the tour.
set -euo pipefail

seen=$(mktemp)
trap 'rm -f "$seen"' EXIT

step() { printf '\n==== %s\n' "$*"; }

# `ends STATUS COMMAND …` prints a command and its output, and checks its exit status.
ends() {
    local expected=$1 status=0
    shift
    printf '$ %s\n' "$*"
    "$@" >"$seen" 2>&1 </dev/null || status=$?
    cat "$seen"
    [ "$status" -eq "$expected" ] || { echo "TOUR: '$*' ended with $status, not $expected"; exit 1; }
}

# Check that the last command's output contains a text, or does not contain it.
says() { grep --quiet --fixed-strings -- "$1" "$seen" || { echo "TOUR: the output lacks: $1"; exit 1; }; }
is_silent_about() { ! grep --quiet --fixed-strings -- "$1" "$seen" || { echo "TOUR: the output must not contain: $1"; exit 1; }; }
is_there() { [ -e "$1" ] || { echo "TOUR: $1 is missing"; exit 1; }; }

mine=(--configfile mine.yaml)

step 'A plan of your own'
cat >mine.yaml <<'YAML'
targets: [first]
datasets:
  small:
    kind: starter
    source: {kind: simulated, size: 16, train: 32, valid: 8}
plans:
  first:
    study: starter_cnn
    measure: [train, throughput]
    settings:
      dataset: small
      batch_size: 8
      model: {hidden: 8}
      loader: {workers: 0}
      training: {epochs: 2}
      precision: fp32
      throughput: {warmup: 1, trials: 2, batches: 2, seconds: 0.1, beside: 1}
    runs:
      reference: {}
      faster: {optimizer: {lr: 3.0e-3}}
YAML
ends 0 dlscale run -n "${mine[@]}"
says 'Why:'
says 'no such job has run here'
says 'data small (preprocess, assemble, describe, preview): never made'
says 'first.{faster, reference} (train, throughput): never made'
ends 0 snakemake "${mine[@]}"
says "Report: $PWD/results/report/first.html"
is_there results/report/first.html
is_there results/plans/first/faster/model.pt
! grep --quiet 'trains .*as fast as' results/report/first.html || { echo 'TOUR: the report calls a learning rate faster'; exit 1; }
ends 0 snakemake "${mine[@]}"
says 'Nothing to be done'
says "Report: $PWD/results/report/first.html"

step 'Progress and reasons'
ends 0 dlscale status --watch "${mine[@]}"
says 'first.reference'
says 'done'
ends 0 dlscale doctor "${mine[@]}"
ends 0 dlscale predict first.reference "${mine[@]}"
ends 0 dlscale evaluate first.reference --weights last "${mine[@]}"
ends 0 dlscale explain first.reference "${mine[@]}"
ends 0 dlscale why "${mine[@]}"
says 'Nothing would run: all results are up to date.'
sed -i 's/lr: 3.0e-3/lr: 4.0e-3/' mine.yaml
ends 0 dlscale why "${mine[@]}"
says 'first.faster (train): optimizer.lr 0.003 → 0.004'
is_silent_about 'first.reference'
ends 0 snakemake "${mine[@]}" -- plan_first
says "Report: $PWD/results/plans/first/report.html"
is_silent_about 'report/first.html'

step 'Typing errors'
sed 's/{lr: 4.0e-3}/{lrr: 4.0e-3}/' mine.yaml >slip.yaml
ends 2 snakemake -n --configfile slip.yaml
says "unknown key 'lrr' (did you mean 'lr'?)"
sed 's/faster: {optimizer: {lr: 4.0e-3}}/faster: {lr: 4.0e-3}/' mine.yaml >slip.yaml
ends 2 snakemake -n --configfile slip.yaml
says "unknown key 'lr' (did you mean 'optimizer.lr'?)"
ends 2 snakemake "${mine[@]}" -- plan_frist
says "plan_frist: no plan is called 'frist' (did you mean 'first'?)"

step 'Your own data'
python - <<'PYTHON'
import numpy as np

fields = np.random.default_rng(0).random((24, 1, 16, 16), dtype=np.float32)
np.savez("fields.npz", input=fields, target=fields**2)
PYTHON
cat >own.yaml <<'YAML'
targets: [second]
datasets:
  fields:
    kind: starter
    source:
      kind: arrays
      all: {input: fields.npz, target: fields.npz}
      shares: {train: 0.75, valid: 0.25}
plans:
  second:
    from: first.reference
    study: starter_cnn
    measure: [train]
    settings: {dataset: fields}
    runs:
      squared: {}
YAML
ends 0 snakemake "${mine[@]}" own.yaml -- data_fields
says "Preview: $PWD/results/data/fields/preview.png"
is_silent_about 'Report:'
ends 0 snakemake "${mine[@]}" own.yaml
says "Report: $PWD/results/report/second.html"
is_there results/report/first.html

step 'A renamed dataset'
sed -i 's/fields:$/squares:/; s/dataset: fields/dataset: squares/' own.yaml
ends 0 dlscale why "${mine[@]}" own.yaml
says 'data squares (preprocess, assemble, describe, preview): never made'
ends 0 snakemake "${mine[@]}" own.yaml
is_there results/data/squares/manifest.json
is_there results/data/fields/manifest.json

step 'A missing file'
sed -i 's/fields.npz/absent.npz/g' own.yaml
ends 2 snakemake "${mine[@]}" own.yaml
says 'FAIL  data squares: absent.npz: no such file or folder; put the file there, or correct datasets.squares.source'
is_silent_about 'Nothing to be done'
is_silent_about 'Traceback'
sed -i 's/absent.npz/fields.npz/g' own.yaml
ends 0 snakemake "${mine[@]}" own.yaml
says 'Nothing to be done'

cp -r results earlier

step 'Ctrl-C, and the same command again'
sed -i 's/epochs: 2/epochs: 40/' mine.yaml
metrics=results/plans/first/reference/metrics.jsonl
rm "$metrics"
# Start Snakemake in its own process group, as a terminal does; otherwise bash makes it ignore Ctrl-C.
set -m
snakemake "${mine[@]}" -- "$metrics" >"$seen" 2>&1 </dev/null &
snakemake=$!
set +m
for _ in $(seq 600); do
    [ "$(cat "$metrics" 2>/dev/null | wc -l)" -lt 5 ] || break
    kill -0 "$snakemake" || break
    sleep 0.1
done
kill -INT -- "-$snakemake" || true  # if it has ended, the output shows why
status=0
wait "$snakemake" || status=$?
cat "$seen"
[ "$status" -ne 0 ] || { echo 'TOUR: snakemake ended with status 0 after Ctrl-C'; exit 1; }
says 'Interrupted. Finished results are kept: the same command continues.'
is_silent_about 'corrupted'
epochs=$(wc -l <"$metrics")
{ [ "$epochs" -ge 5 ] && [ "$epochs" -lt 40 ]; } || { echo "TOUR: the training ended after $epochs epochs"; exit 1; }
ends 0 dlscale status "${mine[@]}"
says 'asked to end; saved after step'
ends 0 snakemake "${mine[@]}" -- "$metrics"
[ "$(wc -l <"$metrics")" -eq 40 ] || { echo 'TOUR: epochs are missing or occur twice'; exit 1; }
log=results/logs/train/first/reference.log
[ "$(grep --count ' started in ' "$log")" -ge 2 ] || { echo "TOUR: $log begins with the second attempt"; exit 1; }
python - results/plans/first/reference/provenance.json <<'PYTHON'
import json
import sys

step = json.load(open(sys.argv[1]))["resumed_from_step"]
assert step and step > 0, f"the training did not resume: {step}"
PYTHON

step 'Comparison with earlier results'
ends 0 snakemake "${mine[@]}" -- plan_first
ends 0 dlscale compare earlier results "${mine[@]}"
says 'first.reference'
says 'training.epochs 2 -> 40'
ends 0 dlscale compare results results --gate "${mine[@]}"
says 'slower beyond noise: none'

step "Snakemake's own report"
rm results/plans/first/summary.csv
ends 2 snakemake "${mine[@]}" --report all.html
says '--report: unfinished: plan first (results/plans/first/summary.csv is not there)'
is_silent_about 'Traceback'
ends 0 snakemake "${mine[@]}" own.yaml --report all.html
is_there all.html

step 'The end of the tour'
