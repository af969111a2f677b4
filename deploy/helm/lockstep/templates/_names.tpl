{{/* Labels of an object: (list ROOT CELL COMPONENT). */}}
{{- define "lockstep.labels" -}}
{{- $root := index . 0 -}}
{{ include "lockstep.selector" . }}
{{- with $root.Values.labels }}
{{ toYaml . }}
{{- end }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* What selects a component's pods, which never changes: (list ROOT CELL COMPONENT). */}}
{{- define "lockstep.selector" -}}
{{ include "lockstep.releaseSelector" (index . 0) }}
lockstep-cell: {{ (index . 1).name | quote }}
app.kubernetes.io/component: {{ index . 2 }}
{{- end }}

{{- define "lockstep.releaseSelector" -}}
app.kubernetes.io/name: lockstep
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* An image by its digest or its tag, which is the chart's release unless it is set: (list ROOT IMAGE). */}}
{{- define "lockstep.image" -}}
{{- $images := (index . 0).Values.images }}{{ $image := index . 1 }}
{{- if $images.registry }}{{ $images.registry }}/{{ end }}{{ $image.name }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Where the first process of TP group D of a cell serves: (list CELL D). */}}
{{- define "lockstep.groupAddress" -}}
{{- $cell := index . 0 }}{{ $workers := $cell.workers }}{{ $group := int (index . 1) }}
{{- $domain := ternary 0 $group $workers.coupled }}
{{- $rank := ternary (mul $group (int $workers.tp)) 0 $workers.coupled | int }}
{{- $node := div $rank (int $workers.ranksPerNode) | int }}
{{- $port := add 50053 (mod $rank (int $workers.ranksPerNode)) }}
{{- printf "%s.%s-worker:%d" (include "lockstep.workerPod" (list $cell $domain $node)) $cell.prefix $port }}
{{- end }}

{{/* The name of a worker's pod: (list CELL DOMAIN NODE). Only where each domain has a StatefulSet has its first node a number. */}}
{{- define "lockstep.workerPod" -}}
{{- $cell := index . 0 }}{{ $node := index . 2 }}
{{- $cell.prefix }}-worker-{{ index . 1 }}
{{- if or $node $cell.workers.setPerDomain }}-{{ $node }}{{ end }}
{{- end }}
