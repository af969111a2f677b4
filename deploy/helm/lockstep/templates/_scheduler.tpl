{{/* The scheduler's pod: (list ROOT CELL). */}}
{{- define "lockstep.schedulerPod" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 }}{{ $values := $cell.scheduler -}}
{{- if eq $values.discovery "kubernetes" }}
serviceAccountName: {{ $cell.prefix }}-scheduler
automountServiceAccountToken: true
{{- end }}
containers:
  - name: scheduler
    {{- include "lockstep.container" (list $root $values.image) | nindent 4 }}
    command: [python3, -m, services.scheduler]
    args:
      {{- include "lockstep.schedulerArgs" $cell | nindent 6 }}
    ports:
      - {name: direct, containerPort: 50052}
      - {name: cell, containerPort: 50054}
      - {name: manage, containerPort: 9100}
    {{- include "lockstep.probes" $values.startupSeconds | nindent 4 }}
    {{- include "lockstep.preStop" . | nindent 4 }}
    resources:
      {{- include "lockstep.resources" (list $values.resources "3Gi") | nindent 6 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: cache, mountPath: /cache}
      {{- include "lockstep.tlsMount" $cell | nindent 6 }}
      {{- include "lockstep.clientMounts" $cell | nindent 6 }}
topologySpreadConstraints:
  {{- include "lockstep.spread" (list $root $cell "scheduler") | nindent 2 }}
volumes:
  - {name: tmp, emptyDir: {sizeLimit: 1Gi}}
  - {name: cache, emptyDir: {sizeLimit: 1Gi}}
  {{- include "lockstep.tlsVolume" (list $cell "scheduler") | nindent 2 }}
  {{- include "lockstep.clientVolumes" $cell | nindent 2 }}
{{- end }}

{{/* A scheduler keeps what the first workers said of their model, so another model is another pod: (list ROOT CELL). */}}
{{- define "lockstep.schedulerTemplate" -}}
{{- $cell := index . 1 }}
{{- $model := list (ternary $cell.model.image (include "lockstep.modelClaim" $cell) (ne $cell.model.image "")) $cell.modelDir | toJson | sha256sum | trunc 8 }}
{{- include "lockstep.podTemplate" (dict "root" (index . 0) "cell" $cell "component" "scheduler" "values" $cell.scheduler "pod" (include "lockstep.schedulerPod" .) "annotations" (dict "lockstep-model" $model)) }}
{{- end }}

{{- define "lockstep.schedulerArgs" -}}
{{- $cell := . }}{{ $workers := .workers }}
{{- if eq .scheduler.discovery "static" }}
{{- $addresses := list }}
{{- range $group := until (int $workers.dp) }}{{ $addresses = append $addresses (include "lockstep.groupAddress" (list $cell $group)) }}{{ end -}}
- --workers={{ join "," $addresses }}
{{- else -}}
- --discovery={{ .scheduler.discovery }}
{{- if eq .scheduler.discovery "dns" }}
- --discovery-name={{ .prefix }}-groups:50053
{{- else }}
- --discovery-service={{ .prefix }}-groups
- --discovery-port=worker
{{- end }}
- --max-dp={{ $workers.places }}
{{- end }}
{{- if $workers.coupled }}
- --coupled
{{- end }}
{{- include "lockstep.listenFlags" (list . 50052) }}
{{- include "lockstep.clientFlags" . }}
{{- if .tls.insecure }}
- --insecure-cell-bind={{ $cell.anyHost }}:50054
{{- else }}
- --cell-listen={{ $cell.anyHost }}:50054
{{- end }}
- --manage-listen={{ $cell.anyHost }}:9100
- --drain-s={{ include "lockstep.drainSeconds" (list . "scheduler") }}
- --log-format=json
{{- include "lockstep.settings" (list "" .scheduler.settings) }}
{{- end }}
