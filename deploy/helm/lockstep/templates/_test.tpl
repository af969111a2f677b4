{{/* A test pod: (list ROOT CELL END_OF_NAME CONTAINER), the last in YAML. */}}
{{- define "lockstep.testPod" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 -}}
{{- $annotations := dict "helm.sh/hook" "test" "helm.sh/hook-delete-policy" "before-hook-creation" }}
{{- $labels := include "lockstep.labels" (list $root $cell "test") | fromYaml }}
{{- $metadata := dict "name" (printf "%s-%s" $cell.prefix (index . 2)) "annotations" $annotations "labels" $labels -}}
apiVersion: v1
kind: Pod
{{ include "lockstep.mergedPod" (dict "root" $root "cell" $cell "component" "test" "metadata" $metadata "pod" (include "lockstep.testSpec" .) "patch" $root.Values.testPodTemplate) }}
{{- end }}

{{- define "lockstep.testSpec" -}}
{{- $cell := index . 1 -}}
restartPolicy: Never
containers:
  - {{- index . 3 | nindent 4 }}
    {{- include "lockstep.container" (list (index . 0) $cell.tokenizer.image) | nindent 4 }}
    resources:
      {{- include "lockstep.resources" (list (dict "cpu" "500m" "memory" "512Mi") "1Gi") | nindent 6 }}
    {{- if or (not $cell.tls.insecure) $cell.clientKeys.testSecret }}
    volumeMounts:
      {{- include "lockstep.tlsMount" $cell | nindent 6 }}
      {{- if $cell.clientKeys.testSecret }}
      - {name: key, mountPath: /key, readOnly: true}
      {{- end }}
      {{- if $cell.clientCa.testSecret }}
      - {name: client, mountPath: /client, readOnly: true}
      {{- end }}
    {{- end }}
{{- if or (not $cell.tls.insecure) $cell.clientKeys.testSecret }}
volumes:
  {{- if $cell.clientKeys.testSecret }}
  - name: key
    secret:
      secretName: {{ $cell.clientKeys.testSecret | quote }}
      defaultMode: 0440
      items: [{key: key, path: key}]
  {{- end }}
  {{- if $cell.clientCa.testSecret }}
  - name: client
    secret:
      secretName: {{ $cell.clientCa.testSecret | quote }}
      defaultMode: 0440
      items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
  {{- end }}
  {{- if not $cell.tls.insecure }}
  - name: tls
    secret:
      secretName: {{ include "lockstep.tlsSecret" (list $cell "tokenizer") | quote }}
      defaultMode: 0440
      # No key: what clients trust, and nothing else.
      items: [{key: ca.crt, path: ca.crt}]
  {{- end }}
{{- end }}
{{- end }}

{{/* The container that asks by gRPC: (list ROOT CELL). */}}
{{- define "lockstep.generateContainer" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 -}}
{{- $embeds := eq (toString (get $cell.workers.settings "task")) "embed" -}}
name: {{ ternary "embed" "generate" $embeds }}
command: [lockstep, {{ ternary "embed" "generate" $embeds }}]
args:
  - {{ $root.Values.testPrompt | quote }}
  - --target=dns:///{{ $cell.prefix }}-tokenizer.{{ $root.Release.Namespace }}.svc:50051
  {{- if not $embeds }}
  - --max-tokens=16
  {{- end }}
  - --timeout=120
  {{- if not $cell.tls.insecure }}
  - --tls-ca=/tls/ca.crt
  - --trust-domain={{ $cell.trustDomain }}
  {{- end }}
  {{- if $cell.clientCa.testSecret }}
  - --tls-cert=/client/tls.crt
  - --tls-key=/client/tls.key
  {{- end }}
  {{- if $cell.clientKeys.testSecret }}
  - --key-file=/key/key
  {{- end }}
{{- end }}

{{/* The same over HTTP. */}}
{{- define "lockstep.askContainer" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 -}}
name: ask
command: [python3, -c, {{ $root.Files.Get "files/ask_http.py" | toJson }}]
args:
  - {{ $root.Values.testPrompt | quote }}
  - --target={{ $cell.prefix }}-tokenizer.{{ $root.Release.Namespace }}.svc:8000
  {{- with get $cell.tokenizer.settings "http-allowed-hosts" }}
  # Otherwise the request would be for a host that is not allowed.
  - {{ splitList "," (toString .) | first | printf "--host=%s" | quote }}
  {{- end }}
  {{- if eq (toString (get $cell.workers.settings "task")) "embed" }}
  - --embed
  {{- else }}
  - --max-tokens=16
  {{- end }}
  - --timeout=120
  {{- if not $cell.tls.insecure }}
  - --tls-ca=/tls/ca.crt
  - --server-name=tokenizer.{{ $cell.trustDomain }}
  {{- end }}
  {{- if $cell.clientCa.testSecret }}
  - --tls-cert=/client/tls.crt
  - --tls-key=/client/tls.key
  {{- end }}
  {{- if $cell.clientKeys.testSecret }}
  - --key-file=/key/key
  {{- end }}
{{- end }}
