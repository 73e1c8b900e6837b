#!/usr/bin/env bash
# Try Allfold on a cluster of this machine: make one with kind, build and load the images, install the
# chart, run the DDP job on two nodes, replace the agents, and say how it went.
#
#   deploy/kubernetes/try-kind.sh           # the cluster is removed in the end
#   KEEP=yes deploy/kubernetes/try-kind.sh  # it is kept; kind delete cluster --name allfold
#
# Needs Docker, kind, kubectl and helm, and some minutes. No test runs this; it was written without a
# cluster at hand.
set -euo pipefail
cd "$(dirname "$0")/../.."

cluster=allfold
version=$(sed -n 's/^appVersion: //p' deploy/helm/allfold/Chart.yaml)
images=(orchestrator agent job)

for tool in docker kind kubectl helm; do
    command -v "$tool" > /dev/null || { echo "try-kind: there is no $tool" >&2; exit 2; }
done

say() { echo "try-kind: $*"; }

finish() {
    status=$?
    if ((status)); then
        say "failed; what there is:"
        kubectl -n allfold get pods,events || true
    fi
    [[ ${KEEP:-} == yes ]] || kind delete cluster --name $cluster
    if ((status)); then say "failed"; else say "ok"; fi
}

for image in "${images[@]}"; do
    docker build --quiet --file "deploy/docker/$image.Dockerfile" --tag "allfold-$image:$version" .
done

trap finish EXIT
kind create cluster --name $cluster --wait 300s --config - << END
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes: [{role: control-plane}, {role: worker}, {role: worker}]
END
kubectl config use-context "kind-$cluster"
for image in "${images[@]}"; do
    kind load docker-image --name $cluster "allfold-$image:$version"
done

kubectl create namespace allfold
kubectl -n allfold create secret generic allfold \
    --from-literal=token="$(openssl rand -hex 32)" \
    --from-literal=admin-token="$(openssl rand -hex 32)" \
    --from-literal=redis-password="$(openssl rand -hex 32)"
# Three nodes on one machine: no room for what a real node sets aside.
helm install allfold deploy/helm/allfold --namespace allfold \
    --set agent.resources.requests.cpu=100m --set agent.resources.requests.memory=256Mi
kubectl -n allfold rollout status deployment/orchestrator --timeout 300s
kubectl -n allfold rollout status daemonset/agent --timeout 300s
kubectl -n allfold exec deploy/orchestrator -- allfold status

sed 's/requests: {cpu: "2", memory: 1Gi}/requests: {cpu: 100m, memory: 256Mi}/' \
    deploy/kubernetes/examples/job-ddp.yaml | kubectl apply --filename -
kubectl -n allfold wait --for condition=complete --timeout 600s job/ddp
kubectl -n allfold logs --prefix --tail 5 --selector batch.kubernetes.io/job-name=ddp

say "the agents are replaced, node by node"
helm upgrade allfold deploy/helm/allfold --namespace allfold --reuse-values \
    --set agent.env.ALLFOLD_LOG_LEVEL=DEBUG
kubectl -n allfold rollout status daemonset/agent --timeout 600s
kubectl -n allfold exec deploy/orchestrator -- allfold status
