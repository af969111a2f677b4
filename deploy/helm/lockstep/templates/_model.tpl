{{/* The claim that has the model. One of ours has a name for what can never change in a claim: another is another claim. */}}
{{- define "lockstep.modelClaim" -}}
{{- $fixed := list .model.hostPath .model.download.storageClass | toJson | sha256sum | trunc 8 }}
{{- .model.pvc | default (printf "%s-model-%s" .prefix $fixed) }}
{{- end }}

{{- define "lockstep.modelVolume" -}}
{{- $cell := index . 1 -}}
- name: model
  {{- if $cell.model.image }}
  image:
    reference: {{ $cell.model.image }}
    pullPolicy: {{ (index . 0).Values.images.pullPolicy }}
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ include "lockstep.modelClaim" $cell | quote }}
    readOnly: true
  {{- end }}
{{- if $cell.model.download.url }}
- name: fetch
  configMap: {name: {{ $cell.prefix }}-model}
{{- end }}
{{- end }}

{{/* A pod that starts before the download has ended waits for it: (list ROOT CELL). */}}
{{- define "lockstep.modelWait" -}}
{{- $cell := index . 1 }}
{{- if $cell.model.download.url }}
initContainers:
  - name: model
    {{- include "lockstep.container" (list (index . 0) $cell.tokenizer.image) | nindent 4 }}
    command: [python3, /fetch/fetch_model.py, --wait, --manifest=/fetch/manifest.json, {{ printf "--directory=%s" $cell.modelDir }}]
    resources:
      requests: {cpu: 100m, memory: 128Mi}
      limits: {cpu: 100m, memory: 128Mi}
    volumeMounts:
      - {name: model, mountPath: /models, readOnly: true}
      - {name: fetch, mountPath: /fetch, readOnly: true}
{{- end }}
{{- end }}

{{/* What downloads the model: (list ROOT CELL). */}}
{{- define "lockstep.modelJob" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 -}}
backoffLimit: 10
template:
  metadata:
    labels:
      {{- include "lockstep.selector" (list $root $cell "model") | nindent 6 }}
  spec:
    {{- include "lockstep.commonPod" (dict "root" $root "cell" $cell) | nindent 4 }}
    restartPolicy: Never
    containers:
      - name: fetch
        {{- include "lockstep.container" (list $root $cell.tokenizer.image) | nindent 8 }}
        command: [python3, /fetch/fetch_model.py, --manifest=/fetch/manifest.json, {{ printf "--directory=%s" $cell.modelDir }}]
        resources:
          requests: {cpu: "1", memory: 512Mi}
          limits: {cpu: "1", memory: 512Mi}
        volumeMounts:
          - {name: model, mountPath: /models}
          - {name: fetch, mountPath: /fetch, readOnly: true}
    volumes:
      - name: model
        persistentVolumeClaim: {claimName: {{ include "lockstep.modelClaim" $cell | quote }}}
      - name: fetch
        configMap: {name: {{ $cell.prefix }}-model}
{{- end }}
