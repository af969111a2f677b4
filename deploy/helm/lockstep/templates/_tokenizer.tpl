{{/* The tokenizer's pod: (list ROOT CELL). */}}
{{- define "lockstep.tokenizerPod" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 }}{{ $values := $cell.tokenizer -}}
containers:
  - name: tokenizer
    {{- include "lockstep.container" (list $root $values.image) | nindent 4 }}
    command: [python3, -m, services.tokenizer]
    args:
      {{- include "lockstep.tokenizerArgs" $cell | nindent 6 }}
    ports:
      - {name: grpc, containerPort: 50051}
      {{- if $values.http.enabled }}
      - {name: http, containerPort: 8000}
      {{- end }}
      - {name: manage, containerPort: 9100}
    {{- include "lockstep.probes" $values.startupSeconds | nindent 4 }}
    {{- include "lockstep.preStop" . | nindent 4 }}
    resources:
      {{- include "lockstep.resources" (list $values.resources "3Gi") | nindent 6 }}
    volumeMounts:
      - {name: model, mountPath: /models, readOnly: true}
      - {name: tmp, mountPath: /tmp}
      - {name: cache, mountPath: /cache}
      {{- include "lockstep.tlsMount" $cell | nindent 6 }}
      {{- include "lockstep.clientMounts" $cell | nindent 6 }}
{{- include "lockstep.modelInit" (list $root $cell "tokenizer") }}
{{- include "lockstep.modelNode" . }}
topologySpreadConstraints:
  {{- include "lockstep.spread" (list $root $cell "tokenizer") | nindent 2 }}
volumes:
  {{- include "lockstep.modelVolume" . | nindent 2 }}
  - {name: tmp, emptyDir: {sizeLimit: 1Gi}}
  - {name: cache, emptyDir: {sizeLimit: 1Gi}}
  {{- include "lockstep.tlsVolume" (list $cell "tokenizer") | nindent 2 }}
  {{- include "lockstep.clientVolumes" $cell | nindent 2 }}
{{- end }}

{{- define "lockstep.tokenizerArgs" -}}
{{- $cell := . -}}
- --model-dir={{ .modelDir }}
{{- with .model.name }}
- {{ printf "--model-name=%s" . | quote }}
{{- end }}
- --scheduler={{ range $i := list 0 1 }}{{ if $i }},{{ end }}{{ $cell.prefix }}-scheduler-{{ $i }}.{{ $cell.prefix }}-scheduler:50054{{ end }}
{{- include "lockstep.listenFlags" (list $cell 50051) }}
{{- include "lockstep.clientFlags" . }}
{{- if .tokenizer.http.enabled }}
- --{{ ternary "insecure-http-bind" "http-listen" .tls.insecure }}={{ $cell.anyHost }}:8000
{{- end }}
- --manage-listen={{ $cell.anyHost }}:9100
- --max-connection-age-s={{ int .tokenizer.maxConnectionAgeSeconds }}
- --drain-s={{ include "lockstep.drainSeconds" (list . "tokenizer") }}
- --log-format=json
{{- with .tokenizer.otlpEndpoint }}
- --otlp-endpoint={{ . }}
{{- end }}
{{- include "lockstep.settings" (list "" .tokenizer.settings) }}
{{- end }}

{{/* The Service that routes name: the one with an address of its own where there is one. */}}
{{- define "lockstep.entry" -}}
{{- .prefix }}-{{ ternary "entry" "tokenizer" (ne .tokenizer.service.type "") }}
{{- end }}

{{- define "lockstep.clientPorts" -}}
ports:
  - {name: grpc, port: 50051, targetPort: grpc, appProtocol: kubernetes.io/h2c}
  {{- if .tokenizer.http.enabled }}
  - {name: http, port: 8000, targetPort: http, appProtocol: {{ ternary "http" "https" .tls.insecure }}}
  {{- end }}
{{- end }}
