{{/* The pod of one node of a failure domain: (list ROOT CELL DOMAIN), the last only where each domain has its own object. */}}
{{- define "lockstep.workerPod.spec" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 }}{{ $values := $cell.workers }}{{ $perNode := int $values.ranksPerNode -}}
containers:
  - name: worker
    {{- include "lockstep.container" (list $root $values.image) | nindent 4 }}
    command: [lockstep, ranks]
    args:
      {{- include "lockstep.workerArgs" (list $cell (index . 2)) | nindent 6 }}
    {{- with include "lockstep.workerEnv" $cell | trim }}
    env:
      {{- . | nindent 6 }}
    {{- end }}
    ports:
      {{- range $i := until $perNode }}
      - {name: {{ if $i }}worker-{{ $i }}{{ else }}worker{{ end }}, containerPort: {{ add 50053 $i }}}
      {{- end }}
      - {name: manage, containerPort: 9100}
      {{- range $i := until $perNode }}
      - {name: rank-{{ $i }}, containerPort: {{ add 9101 $i }}}
      {{- end }}
    {{- include "lockstep.probes" $values.startupSeconds | nindent 4 }}
    {{- include "lockstep.preStop" (list $root $cell) | nindent 4 }}
    resources:
      {{- include "lockstep.workerResources" $values | nindent 6 }}
    volumeMounts:
      - {name: model, mountPath: /models, readOnly: true}
      - {name: tmp, mountPath: /tmp}
      - {name: cache, mountPath: /cache}
      - {name: shm, mountPath: /dev/shm}
      {{- include "lockstep.tlsMount" $cell | nindent 6 }}
{{- include "lockstep.modelInit" (list $root $cell "worker") }}
{{- include "lockstep.modelNode" . }}
{{- with $values.gpu.renderGroups }}
securityContext:
  supplementalGroups: {{ toJson . }}
{{- end }}
{{- with $values.gpu.resource }}
tolerations:
  - {key: {{ . }}, operator: Exists, effect: NoSchedule}
{{- end }}
{{- if gt (int $values.nodes) 1 }}
  {{- include "lockstep.sameZone" . }}
{{- else }}
topologySpreadConstraints:
  {{- include "lockstep.spread" (list $root $cell "worker") | nindent 2 }}
{{- end }}
{{- if $values.gpu.deviceClass }}
resourceClaims:
  - {name: gpu, resourceClaimTemplateName: {{ include "lockstep.gpuClaim" $cell }}}
{{- end }}
volumes:
  {{- include "lockstep.modelVolume" . | nindent 2 }}
  - {name: tmp, emptyDir: {sizeLimit: 4Gi}}
  - {name: cache, emptyDir: {sizeLimit: {{ $values.cacheSize }}}}
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}}
  {{- include "lockstep.tlsVolume" (list $cell "worker") | nindent 2 }}
{{- end }}

{{- define "lockstep.workerArgs" -}}
{{- $cell := index . 0 }}{{ $domain := index . 1 }}{{ $values := $cell.workers -}}
- {{ $cell.modelDir }}
- --tp={{ int $values.tp }}
{{- if or $values.coupled (eq $cell.scheduler.discovery "static") }}
- --dp={{ int $values.dp }}
{{- end }}
{{- if $values.ep }}
- --ep
{{- end }}
- --ranks-per-node={{ int $values.ranksPerNode }}
{{- if gt (int $values.nodes) 1 }}
- --nodes={{ int $values.nodes }}
- --node-rank=$({{ include "lockstep.nodeVariable" $values }})
{{- if $values.setPerDomain }}
- --first-node={{ include "lockstep.workerPod" (list $cell $domain 0) }}.{{ $cell.prefix }}-worker
{{- else }}
- --first-node=$(LWS_LEADER_ADDRESS)
{{- end }}
{{- end }}
{{- if and (not $values.coupled) (eq $cell.scheduler.discovery "static") (gt (int $values.dp) 1) }}
- --dp-rank={{ if $values.setPerDomain }}{{ $domain }}{{ else }}$(GROUP_INDEX){{ end }}
{{- end }}
{{- include "lockstep.listenFlags" (list $cell 50053) }}
- --manage-listen={{ $cell.anyHost }}:9100
- --drain-s={{ include "lockstep.drainSeconds" (list $cell "worker") }}
- --max-failed-starts={{ int $values.maxFailedStarts }}
- --log-format=json
- --worker.device={{ ternary "cuda" "cpu" $values.onGpu }}
{{- include "lockstep.settings" (list "worker." $values.settings) }}
{{- end }}

{{- define "lockstep.nodeVariable" -}}
{{ ternary "NODE_RANK" "LWS_WORKER_INDEX" .setPerDomain }}
{{- end }}

{{/* A LeaderWorkerSet gives its pods LWS_LEADER_ADDRESS and LWS_WORKER_INDEX. */}}
{{- define "lockstep.workerEnv" -}}
{{- if eq .workers.kind "LeaderWorkerSet" }}
- name: GROUP_INDEX
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
{{- else if eq .workers.kind "StatefulSet" }}
- name: {{ ternary "NODE_RANK" "GROUP_INDEX" .workers.setPerDomain }}
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
{{- end }}
{{- range $name, $value := .workers.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* Memory that processes and /dev/shm may take together, disk for volumes and log, and every GPU of the node's ranks. */}}
{{- define "lockstep.workerResources" -}}
{{- $memory := printf "%dMi" (add (include "lockstep.mebibytes" .resources.memory) (include "lockstep.mebibytes" .sharedMemory)) }}
{{- $disk := printf "%dMi" (add (include "lockstep.mebibytes" .cacheSize) 5120) }}
{{- $amounts := dict "memory" $memory "ephemeral-storage" $disk }}
{{- if .gpu.resource }}{{ $_ := set $amounts .gpu.resource (int .ranksPerNode) }}{{ end }}
{{- include "lockstep.amounts" (list .resources $amounts) }}
{{- if .gpu.deviceClass }}
claims: [{name: gpu}]
{{- end }}
{{- end }}

{{- define "lockstep.mebibytes" -}}
{{- $factor := ternary 1 (ternary 1024 1048576 (hasSuffix "Gi" .)) (hasSuffix "Mi" .) }}
{{- mul (regexFind "^[0-9]+" . | int) $factor }}
{{- end }}

{{/* How a pod claims its GPUs by dynamic resource allocation. */}}
{{- define "lockstep.gpuClaimSpec" -}}
spec:
  devices:
    requests:
      - name: gpu
        exactly: {deviceClassName: {{ .gpu.deviceClass | quote }}, allocationMode: ExactCount, count: {{ int .ranksPerNode }}}
{{- end }}

{{/* The name of its template, which cannot be changed: another spec is another template. */}}
{{- define "lockstep.gpuClaim" -}}
{{- printf "%s-gpu-%s" .prefix (include "lockstep.gpuClaimSpec" .workers | sha256sum | trunc 8) }}
{{- end }}

{{/* The labels of a failure domain's pods, in YAML: (list ROOT CELL DOMAIN). */}}
{{- define "lockstep.domainSelector" -}}
{{- $cell := index . 1 -}}
{{ include "lockstep.selector" (list (index . 0) $cell "worker") }}
{{- if eq $cell.workers.kind "LeaderWorkerSet" }}
leaderworkerset.sigs.k8s.io/group-index: {{ index . 2 | quote }}
{{- else }}
lockstep-domain: {{ index . 2 | quote }}
{{- end }}
{{- end }}

{{/*
A domain's pods in one zone where that can be, since collectives are between them: (list ROOT CELL DOMAIN). All groups of
a LeaderWorkerSet have one template, so there the pod's own label must name the group, as it can from 1.31 on.
*/}}
{{- define "lockstep.sameZone" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 }}
{{- $isOneOfMany := and (eq $cell.workers.kind "LeaderWorkerSet") (not $cell.workers.coupled) }}
{{- if or (not $isOneOfMany) (semverCompare ">=1.31-0" $root.Capabilities.KubeVersion.Version) }}
affinity:
  podAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: topology.kubernetes.io/zone
          labelSelector:
            matchLabels:
              {{- if $isOneOfMany }}
              {{- include "lockstep.selector" (list $root $cell "worker") | nindent 14 }}
              {{- else }}
              {{- include "lockstep.domainSelector" . | nindent 14 }}
              {{- end }}
          {{- if $isOneOfMany }}
          matchLabelKeys: [leaderworkerset.sigs.k8s.io/group-index]
          {{- end }}
{{- end }}
{{- end }}

{{/* One that podTemplate is merged into: (list ROOT CELL DOMAIN). */}}
{{- define "lockstep.workerTemplate" -}}
{{- $cell := index . 1 }}
{{- include "lockstep.podTemplate" (dict "root" (index . 0) "cell" $cell "component" "worker" "values" $cell.workers "pod" (include "lockstep.workerPod.spec" .)) }}
{{- end }}
