{{/* The claim that has the model. One of ours has a name for what can never change in a claim: another is another claim. */}}
{{- define "lockstep.modelClaim" -}}
{{- $download := .model.download }}
{{- $fixed := list .model.hostPath $download.nodePath $download.storageClass $download.accessMode | toJson | sha256sum | trunc 8 }}
{{- .model.pvc | default (printf "%s-model-%s" .prefix $fixed) }}
{{- end }}

{{/* Where pods see the model: in what is downloaded, as the hub's library keeps it. */}}
{{- define "lockstep.modelDir" -}}
{{- if .model.download.repository }}
{{- printf "/models/models--%s/snapshots/%s" (replace "/" "--" .model.download.repository) .model.download.commit }}
{{- else }}
{{- printf "/models/%s" .model.path | trimSuffix "/" }}
{{- end }}
{{- end }}

{{/* What its tokenizers call it by themselves. */}}
{{- define "lockstep.modelName" -}}
{{- .model.name | default .model.download.repository | default (base .modelDir) }}
{{- end }}

{{- define "lockstep.modelVolume" -}}
{{- $cell := index . 1 }}{{ $download := $cell.model.download -}}
- name: model
  {{- if $cell.model.image }}
  image:
    reference: {{ $cell.model.image }}
    pullPolicy: {{ (index . 0).Values.images.pullPolicy }}
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ include "lockstep.modelClaim" $cell | quote }}
    {{- if not $download.nodePath }}
    readOnly: true
    {{- end }}
  {{- end }}
{{- if and $download.nodePath $download.caConfigMap }}
- name: ca
  configMap: {name: {{ $download.caConfigMap | quote }}}
{{- end }}
{{- end }}

{{/* A pod that needs a downloaded model waits for it, or fills its own node's cache: (list ROOT CELL PART). */}}
{{- define "lockstep.modelInit" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 }}{{ $download := $cell.model.download }}
{{- if $download.nodePath }}
initContainers:
  - {{- include "lockstep.pull" (list $root $cell (ternary "--without-weights" "" (eq (index . 2) "tokenizer"))) | nindent 4 }}
{{- else if $download.repository }}
initContainers:
  - name: model
    {{- include "lockstep.container" (list $root $cell.tokenizer.image) | nindent 4 }}
    command: [lockstep, pull]
    args: [{{ include "lockstep.pulled" $cell | quote }}, --wait]
    env:
      - {name: HF_HUB_CACHE, value: /models}
    resources:
      {{- include "lockstep.resources" (list (dict "cpu" "100m" "memory" "256Mi") "1Gi") | nindent 6 }}
    volumeMounts:
      - {name: model, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "lockstep.pulled" -}}
{{ .model.download.repository }}@{{ .model.download.commit }}
{{- end }}

{{/* The container that downloads: (list ROOT CELL FLAG). Its pod has the volumes model, tmp and, with caConfigMap, ca. */}}
{{- define "lockstep.pull" -}}
{{- $cell := index . 1 }}{{ $download := $cell.model.download -}}
name: model
{{ include "lockstep.container" (list (index . 0) $cell.tokenizer.image) }}
command: [lockstep, pull]
args: [{{ include "lockstep.pulled" $cell | quote }}{{ with index . 2 }}, {{ . }}{{ end }}]
env:
  - {name: HF_HUB_OFFLINE, value: "0"}
  - {name: HF_HUB_CACHE, value: /models}
  - {name: HF_HOME, value: /tmp/huggingface}
  - {name: HF_HUB_DISABLE_TELEMETRY, value: "1"}
  # Pieces of files, which the volume has whole.
  - {name: HF_XET_CHUNK_CACHE_SIZE_BYTES, value: "0"}
  {{- with $download.endpoint }}
  - {name: HF_ENDPOINT, value: {{ . | quote }}}
  {{- end }}
  {{- with $download.proxy }}
  - {name: HTTPS_PROXY, value: {{ . | quote }}}
  {{- end }}
  {{- if $download.caConfigMap }}
  - {name: SSL_CERT_FILE, value: /ca/ca.crt}
  {{- end }}
  {{- with $download.tokenSecret }}
  - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: token}}}
  {{- end }}
resources:
  {{- include "lockstep.resources" (list (dict "cpu" "1" "memory" "1Gi") "2Gi") | nindent 2 }}
volumeMounts:
  - {name: model, mountPath: /models}
  - {name: tmp, mountPath: /tmp}
  {{- if $download.caConfigMap }}
  - {name: ca, mountPath: /ca, readOnly: true}
  {{- end }}
{{- end }}

{{/* Pods on the one node that can mount the volume: (list ROOT CELL). */}}
{{- define "lockstep.modelNode" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 }}
{{- $download := $cell.model.download }}
{{- if and $download.repository (not $download.nodePath) (eq $download.accessMode "ReadWriteOnce") }}
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "lockstep.releaseSelector" $root | nindent 12 }}
            lockstep-cell: {{ $cell.name | quote }}
          matchExpressions:
            - {key: app.kubernetes.io/component, operator: In, values: [model, tokenizer, worker]}
{{- end }}
{{- end }}

{{/* What downloads the model: (list ROOT CELL). */}}
{{- define "lockstep.modelJob" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 -}}
backoffLimit: 10
activeDeadlineSeconds: {{ int $cell.model.download.deadlineSeconds }}
template:
  {{- include "lockstep.mergedPod" (dict "root" $root "cell" $cell "component" "model" "metadata" dict "pod" (include "lockstep.modelPod" .) "patch" $cell.model.podTemplate) | nindent 2 }}
{{- end }}

{{- define "lockstep.modelPod" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 -}}
restartPolicy: Never
containers:
  - {{- include "lockstep.pull" (list $root $cell "") | nindent 4 }}
{{- include "lockstep.modelNode" . }}
volumes:
  - name: model
    persistentVolumeClaim: {claimName: {{ include "lockstep.modelClaim" $cell | quote }}}
  - {name: tmp, emptyDir: {sizeLimit: 1Gi}}
  {{- with $cell.model.download.caConfigMap }}
  - name: ca
    configMap: {name: {{ . | quote }}}
  {{- end }}
{{- end }}

{{/* JSON of the components whose pods download: CELL. */}}
{{- define "lockstep.downloaders" -}}
{{- $download := .model.download }}
{{- ternary (ternary (list "tokenizer" "worker") (list "model") (ne $download.nodePath "")) list (ne $download.repository "") | toJson }}
{{- end }}

{{/* The port that a download dials: CELL. */}}
{{- define "lockstep.sourcePort" -}}
{{- $url := .model.download.proxy | default .model.download.endpoint | default "https://huggingface.co" | urlParse }}
{{- regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "443" "80" (eq $url.scheme "https")) }}
{{- end }}
