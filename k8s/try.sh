#!/usr/bin/env bash
# Tries the chart on this machine: a cluster of kind, KubeRay, the CPU image, and a night with its results.
# Never run: it was written where Docker is not. Needs docker, kind, kubectl and helm, 12 GB of memory and 20 GB of disk.
#   k8s/try.sh          # some minutes
#   k8s/try.sh delete   # the end of the cluster
set -euo pipefail
cd "$(dirname "$0")/.."
CLUSTER=swiftbatch-try
IMAGE=swiftbatch:0.1.0-cpu

if [ "${1:-}" = delete ]; then
  exec kind delete cluster --name "$CLUSTER"
fi
for program in docker kind kubectl helm; do
  command -v "$program" > /dev/null || { echo "$program is missing: install it first" >&2; exit 2; }
done
in_namespace() {
  kubectl --context "kind-$CLUSTER" --namespace swiftbatch "$@"
}

docker build --tag "$IMAGE" .
kind get clusters | grep --quiet --line-regexp "$CLUSTER" || kind create cluster --name "$CLUSTER" --wait 120s
kind load docker-image "$IMAGE" --name "$CLUSTER"

helm repo add --force-update kuberay https://ray-project.github.io/kuberay-helm/
helm upgrade --install kuberay-operator kuberay/kuberay-operator --kube-context "kind-$CLUSTER" --version 1.6.0 \
  --namespace kuberay-system --create-namespace --wait --set 'featureGates[0].name=RayCronJob' \
  --set 'featureGates[0].enabled=true'

in_namespace create namespace swiftbatch --dry-run=client --output yaml | in_namespace apply --filename -
in_namespace create configmap swiftbatch-demo-jobs --from-file=k8s/overlays/cpu-demo/demo-jobs/jobs.jsonl \
  --dry-run=client --output yaml | in_namespace apply --filename -
helm upgrade --install swiftbatch ./k8s/chart --kube-context "kind-$CLUSTER" --namespace swiftbatch \
  --values k8s/overlays/cpu-demo/values.yaml
until in_namespace wait pod --for=condition=Ready --selector ray.io/node-type=head --timeout=600s; do sleep 5; done

night="night-$(date +%H%M%S)"
in_namespace create job --from=cronjob/swiftbatch-nightly "$night"
if ! in_namespace wait "job/$night" --for=condition=Complete --timeout=1800s; then
  in_namespace get pods --output wide
  in_namespace logs "job/$night" --tail=50
  exit 1
fi
head=$(in_namespace get pods --selector ray.io/node-type=head --output name | head --lines=1)
in_namespace exec "$head" --container ray-head -- swiftbatch status /store/runs/jobs.jsonl
in_namespace exec "$head" --container ray-head -- swiftbatch results /store/runs/jobs.jsonl | cut -c 1-300
echo "to delete the cluster: k8s/try.sh delete"
