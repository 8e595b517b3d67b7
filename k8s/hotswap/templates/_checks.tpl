{{/* Contradictions that the schema cannot see. */}}
{{- define "hotswap.checks" -}}
{{- $v := .Values }}
{{- if and (eq $v.clusterTls.mode "existingSecret") (not $v.clusterTls.existingSecret) }}
{{- fail "clusterTls.existingSecret: name the secret with tls.crt, tls.key and ca.crt, or set clusterTls.mode to certManager" }}
{{- end }}
{{- if and (eq $v.gateway.tls.mode "existingSecret") (not $v.gateway.tls.existingSecret) }}
{{- fail "gateway.tls.existingSecret: name the secret with tls.crt and tls.key" }}
{{- end }}
{{- if and (not $v.etcd.enabled) (not $v.externalStore.endpoints) }}
{{- fail "externalStore.endpoints: name the members of your etcd, or set etcd.enabled" }}
{{- end }}
{{- if and (ne $v.trainer.mode "none") (not $v.trainer.config) }}
{{- fail "trainer.config: give the trainer's configuration; trainer/configs has examples" }}
{{- end }}
{{- if eq $v.trainer.mode "colocated" }}
{{- if or (ne (int $v.rollout.replicas) 1) (ne $v.rollout.kind "StatefulSet") }}
{{- fail "trainer.mode colocated: there is one trainer, so set rollout.replicas to 1 and rollout.kind to StatefulSet" }}
{{- end }}
{{- if and $v.rollout.gpus (not $v.rollout.deviceClass) }}
{{- fail "rollout.deviceClass: two containers share GPUs by a claim only; name the device class, e.g. gpu.nvidia.com" }}
{{- end }}
{{- end }}
{{- if ne (empty $v.etcd.tls.existingSecret) (empty $v.etcd.tls.clientSecret) }}
{{- fail "etcd.tls: name both secrets, existingSecret of the members and clientSecret of those that ask them, or none" }}
{{- end }}
{{- if has (int $v.peer.dataPort) (list 8001 8003 29500) }}
{{- fail "peer.dataPort: 8001, 8003 and 29500 are other ports of the pod; choose another one" }}
{{- end }}
{{- if and (gt (int $v.rollout.groupSize) 1) $v.rollout.rdma (ge (int $v.peer.rdma) (int $v.rollout.rdma)) }}
{{- fail "peer.rdma: the pods of an instance need RDMA devices too; set it below rollout.rdma" }}
{{- end }}
{{- range $tier := list "gateway" "rollout" }}
{{- with (get $v $tier).autoscaling }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
{{- fail (printf "%s.autoscaling: minReplicas is more than maxReplicas" $tier) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $where, $needs := dict "gateway.resources" $v.gateway.resources "rollout.resources" $v.rollout.resources "peer.resources" $v.peer.resources "trainer.resources" $v.trainer.resources "etcd.resources" $v.etcd.resources "etcd.usersResources" $v.etcd.usersResources "persist.resources" $v.persist.resources "model.publishResources" $v.model.publishResources }}
{{- range $name, $limit := $needs.limits }}
{{- with get $needs.requests $name }}
{{- if gt (include "hotswap.number" . | float64) (include "hotswap.number" $limit | float64) }}
{{- fail (printf "%s: the request for %s is more than its limit" $where $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if gt (len (printf "%s-train-%s" (include "hotswap.fullname" .) $v.trainer.run)) 63 }}
{{- fail "trainer.run: the Job's name would have more than 63 characters; shorten it, the release's name or fullnameOverride" }}
{{- end }}
{{- include "hotswap.checkLive" . }}
{{- if and (eq $v.rollout.kind "StatefulSet") (ne (int $v.rollout.groupSize) 1) }}
{{- fail "rollout.groupSize: an instance over several pods needs rollout.kind LeaderWorkerSet" }}
{{- end }}
{{- end }}

{{/* Refuses changes that etcd and the instances cannot follow while they run. Tools that render without a cluster do not see the objects, and refuse nothing. */}}
{{- define "hotswap.checkLive" -}}
{{- range (lookup "apps/v1" "StatefulSet" .Release.Namespace "").items }}
{{- $labels := .metadata.labels | default dict }}
{{- $part := get $labels "app.kubernetes.io/component" }}
{{- if and (eq (get $labels "app.kubernetes.io/name") $.Chart.Name) (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) }}
{{- if ne .metadata.name (printf "%s-%s" (include "hotswap.fullname" $) $part) }}
{{- fail (printf "fullnameOverride: this release has %s, and another name would replace it and all that it holds; set fullnameOverride to %s" .metadata.name (trimSuffix (printf "-%s" $part) .metadata.name)) }}
{{- end }}
{{- end }}
{{- end }}
{{- $e := .Values.etcd }}
{{- $name := printf "%s-etcd" (include "hotswap.fullname" .) }}
{{- with and $e.enabled (lookup "apps/v1" "StatefulSet" .Release.Namespace $name) }}
{{- if ne (int .spec.replicas) (int $e.members) }}
{{- fail (printf "etcd.members: %s has %d, and another number here would end the store; k8s/README.md says how to change it" $name (int .spec.replicas)) }}
{{- end }}
{{- $claim := (first .spec.volumeClaimTemplates).spec }}
{{- $size := include "hotswap.number" $claim.resources.requests.storage }}
{{- if or (ne $size (include "hotswap.number" $e.storage.size)) (ne (default "" $claim.storageClassName) $e.storage.className) }}
{{- fail (printf "etcd.storage: %s has %s of class %q, which Kubernetes lets nobody change; k8s/README.md says how" $name $claim.resources.requests.storage (default "" $claim.storageClassName)) }}
{{- end }}
{{- end }}
{{- end }}
