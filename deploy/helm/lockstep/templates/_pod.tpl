{{/*
A service's pod template: (dict "root" "cell" "component" "values" "pod" "annotations"), where "values" has podTemplate,
"pod" is a pod's spec that lacks what all pods have, and "annotations" may be left out. The result is YAML.
*/}}
{{- define "lockstep.podTemplate" -}}
{{- $metadata := dict }}
{{- with .annotations }}{{ $_ := set $metadata "annotations" . }}{{ end }}
{{- $merged := include "lockstep.mergedPod" (dict "root" .root "cell" .cell "component" .component "metadata" $metadata "pod" .pod "patch" .values.podTemplate) | fromYaml }}
{{- $needed := include "lockstep.graceSeconds" (list .cell .component) | int }}
{{- $given := int $merged.spec.terminationGracePeriodSeconds }}
{{- if lt $given $needed }}
  {{- fail (printf "cells[%s].%s.podTemplate.spec.terminationGracePeriodSeconds: %d is below preStopSeconds + %s + teardownSeconds = %d" .cell.name .values.key $given (ternary "answerSeconds" "drainSeconds" (eq .component "tokenizer")) $needed) }}
{{- end }}
{{- toYaml $merged }}
{{- end }}

{{/*
YAML of a pod or pod template into which a podTemplate is merged: (dict "root" "cell" "component" "metadata" "pod" "patch").
null takes a key away, in any map. A pod's labels name no version: one that changes restarts the pod, and loading a model takes long.
*/}}
{{- define "lockstep.mergedPod" -}}
{{- $labels := merge (dict) (include "lockstep.selector" (list .root .cell .component) | fromYaml) .root.Values.labels }}
{{- $common := include "lockstep.commonPod" . | fromYaml }}
{{- $spec := (include "lockstep.merged" (list $common (.pod | fromYaml)) | fromJson).v }}
{{- $base := dict "metadata" (merge (dict "labels" $labels) .metadata) "spec" $spec }}
{{- $merged := (include "lockstep.merged" (list $base .patch) | fromJson).v }}
{{- toYaml (include "lockstep.withoutNulls" $merged | fromJson).v }}
{{- end }}

{{/* Seconds between SIGTERM and the end of what is in flight: (list CELL COMPONENT). */}}
{{- define "lockstep.drainSeconds" -}}
{{- $shutdown := (index . 0).shutdown }}
{{- ternary $shutdown.answerSeconds $shutdown.drainSeconds (eq (index . 1) "tokenizer") | int }}
{{- end }}

{{/* Seconds until a pod that is asked to end is killed: (list CELL COMPONENT). */}}
{{- define "lockstep.graceSeconds" -}}
{{- $shutdown := (index . 0).shutdown }}
{{- add (int $shutdown.preStopSeconds) (include "lockstep.drainSeconds" . | int) (int $shutdown.teardownSeconds) }}
{{- end }}

{{- define "lockstep.commonPod" -}}
automountServiceAccountToken: false
serviceAccountName: {{ .cell.prefix }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "lockstep.graceSeconds" (list .cell .component) }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* What every container has: (list ROOT IMAGE). */}}
{{- define "lockstep.container" -}}
image: {{ include "lockstep.image" . }}
imagePullPolicy: {{ (index . 0).Values.images.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* What a container asks for and may have at most: (list RESOURCES DISK). The disk is for its volumes, and 1 GiB for its log. */}}
{{- define "lockstep.resources" -}}
{{- include "lockstep.amounts" (list (index . 0) (dict "memory" (index . 0).memory "ephemeral-storage" (index . 1))) }}
{{- end }}

{{/* The same, of amounts that are both: (list RESOURCES AMOUNTS). Only of CPU may a container have more than it asks for. */}}
{{- define "lockstep.amounts" -}}
{{- $resources := index . 0 }}{{ $amounts := index . 1 }}
{{- $limit := default $resources.cpu $resources.cpuLimit -}}
requests: {{ merge (dict "cpu" $resources.cpu) $amounts | toJson }}
limits: {{ ternary $amounts (merge (dict "cpu" $limit) $amounts) (eq $limit "none") | toJson }}
{{- end }}

{{/* Probes of a service's management port: startupSeconds. */}}
{{- define "lockstep.probes" -}}
startupProbe:
  httpGet: {path: /startupz, port: manage}
  periodSeconds: 5
  failureThreshold: {{ div (add (int .) 4) 5 }}
livenessProbe:
  httpGet: {path: /livez, port: manage}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: manage}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{/* New clients go elsewhere before a process is asked to end: (list ROOT CELL). Before 1.30 there is no sleep action. */}}
{{- define "lockstep.preStop" -}}
{{- $root := index . 0 }}{{ $seconds := int (index . 1).shutdown.preStopSeconds }}
{{- if $seconds }}
lifecycle:
  preStop:
    {{- if semverCompare ">=1.30-0" $root.Capabilities.KubeVersion.Version }}
    sleep: {seconds: {{ $seconds }}}
    {{- else }}
    exec: {command: [python3, -c, "import time; time.sleep({{ $seconds }})"]}
    {{- end }}
{{- end }}
{{- end }}

{{/* Replicas on different nodes and in different zones where there are some: (list ROOT CELL COMPONENT). */}}
{{- define "lockstep.spread" -}}
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "lockstep.selector" $ | nindent 6 }}
{{- end }}
{{- end }}

{{/* Settings as flags: a service refuses one that it does not have. (list PREFIX SETTINGS) */}}
{{- define "lockstep.settings" -}}
{{- $prefix := index . 0 }}
{{- range $name, $value := index . 1 }}
{{- if kindIs "bool" $value }}
- --{{ $prefix }}{{ if not $value }}no-{{ end }}{{ $name }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s%s=%s" $prefix $name $value | quote }}
{{- else }}
- {{ printf "--%s%s=%s" $prefix $name (toJson $value) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Seconds within which a replica of a Deployment starts, with ten minutes to place it and to pull its image: (list CELL PART). */}}
{{- define "lockstep.progressSeconds" -}}
{{- add (int (index . 1).startupSeconds) 600 (ternary (int (index . 0).model.download.deadlineSeconds) 0 (ne (index . 0).model.download.repository "")) }}
{{- end }}
